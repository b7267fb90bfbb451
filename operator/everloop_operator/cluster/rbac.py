"""Every right that the operator needs, and why. The chart's roles say the same; a test compares them.

A right that is missing shows as slowness, because kopf retries 403: `self_check` reads each watched kind once at start.
"""

from __future__ import annotations

from dataclasses import dataclass

from everloop_operator.api import names


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of a Role or ClusterRole."""

    group: str
    resource: str
    verbs: tuple[str, ...]
    why: str
    names: tuple[str, ...] = ()
    """Only objects of these names; empty means all."""


NAMESPACE_RULES: tuple[Rule, ...] = (
    Rule("", "events", ("create", "list"), "tell the story of a session; say why a claim or a mount does not come"),
    Rule("", "persistentvolumeclaims", ("create", "get"), "make a journal's claim; say which one is missing"),
    Rule("", "pods", ("create", "delete", "get", "list", "patch", "watch"), "the pods of sessions and jobs, by apply"),
    Rule("policy", "poddisruptionbudgets", ("create", "patch"), "spec.pod.disruptionBudget; it goes with its pod"),
    Rule("", "secrets", ("create", "delete", "patch"), "tokens, keys of jobs; no secret of a tenant is ever read"),
    Rule(names.GROUP, names.RL_JOB_PLURAL, ("get", "list", "watch"), "what people want; get: before a pod is made"),
    Rule(names.GROUP, f"{names.RL_JOB_PLURAL}/status", ("update",), "what there is; the spec is not written"),
    Rule(names.GROUP, f"{names.RL_JOB_PLURAL}/finalizers", ("update",), "own children that block deletion"),
    Rule(names.GROUP, names.TRAINING_SESSION_PLURAL, ("get", "list", "watch"), "the same"),
    Rule(names.GROUP, names.TRAINING_SESSION_PLURAL, ("create", "patch", "delete"), "jobs; finalizer; TTL"),
    Rule(names.GROUP, f"{names.TRAINING_SESSION_PLURAL}/status", ("update",), "what there is; the spec is not written"),
    # blockOwnerDeletion on a child asks for this where the OwnerReferencesPermissionEnforcement plugin is on.
    Rule(names.GROUP, f"{names.TRAINING_SESSION_PLURAL}/finalizers", ("update",), "own children that block deletion"),
)
"""For every namespace with TrainingSessions."""

NODE_RULES: tuple[Rule, ...] = (
    Rule("", "nodes", ("get", "list", "watch"), "see that a node is lost; nodes are never written"),
    Rule("", "persistentvolumes", ("get",), "say how a claim's volume is shared, and what it comes from"),
)
"""For what belongs to no namespace; an installation may do without."""

RELEASE_RULES: tuple[Rule, ...] = (
    Rule("", "secrets", ("create",), "the master key, at the first start"),
    Rule("", "secrets", ("get",), "the master key", names=(names.MASTER_KEY_SECRET,)),
    Rule("", "secrets", ("patch", "delete"), "API keys of jobs and the token of the metrics ports, by apply"),
    Rule("", "secrets", ("list",), "find the API keys of jobs that are gone; their content is not asked for"),
)
"""For the operator's own namespace."""
