"""Why something is refused."""

from __future__ import annotations

ACCOUNTS = "There are no accounts, organisations or projects: a key belongs to a namespace of Kubernetes."
BILLING = "Nothing is billed here; what is used is in the metrics, see [monitoring](monitoring.md)."
AUDIT = "Who did what to a session or key is in the Kubernetes audit log."
TRACES = "No timelines are recorded; times of operations are in the metrics, see [monitoring](monitoring.md)."
COPIES = "There are no projects to copy into; `create_training_client_from_state` and `save_state` make one's own."
LOGIN = "Keys are Secrets of Kubernetes: who may write them adds and removes them there."
POINTERS = "Nothing is fetched for a client: it sends the image itself, see [images](vision.md)."
SOUND = "No base model that is served takes sound."
OPTIMIZERS = "AdamW is the only optimizer."
STABLE_REINFORCE = "Its definition is not published; see [losses](losses.md)."
