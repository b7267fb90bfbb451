"""The rights of the gateway, and no more: the tests run it as a user that has just these."""

from __future__ import annotations

from everloop_operator.api import names

CLUSTER_RULES = [
    {"apiGroups": [names.GROUP], "resources": [names.TRAINING_SESSION_PLURAL], "verbs": ["list", "watch", "patch"]},
    {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["create", "get"]},
]
RELEASE_RULES = [
    {"apiGroups": [""], "resources": ["secrets"], "verbs": ["list", "watch"]},
    {"apiGroups": [""], "resources": ["secrets"], "resourceNames": [names.MASTER_KEY_SECRET], "verbs": ["get"]},
    {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get", "list", "watch", "create", "delete"]},
]
