"""Why something is refused."""

from __future__ import annotations

ACCOUNTS = "There are no accounts or organisations; the one project of a key is its namespace of Kubernetes."
BILLING = "Nothing is billed here; what is used is in the metrics, see [monitoring](monitoring.md)."
AUDIT = "Who did what to a session or key is in the Kubernetes audit log."
TRACES = "No timelines are recorded; times of operations are in the metrics, see [monitoring](monitoring.md)."
LOGIN = "Keys are Secrets of Kubernetes: who may write them adds and removes them there."
POINTERS = "Nothing is fetched for a client: it sends the image itself, see [images](vision.md)."
SOUND = "No base model that is served takes sound."
OPTIMIZERS = "AdamW is the only optimizer."
STABLE_REINFORCE = "Its definition is not published; see [losses](losses.md)."
