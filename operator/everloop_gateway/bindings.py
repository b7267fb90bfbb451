"""Bindings: which TrainingSession a stream belongs to, in one immutable ConfigMap each.

They belong to the storage: its claim owns them, so that they outlive a TrainingSession that is deleted and created
again on it. A binding that is written before any pod has opened the storage cannot name its lineage. The first call
that is sent on settles that, by one more ConfigMap for all such bindings of the TrainingSession; as long as there is
none, nothing has been sent anywhere, and any lineage is the right one.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any

from everloop_gateway.ids import Stream
from everloop_gateway.kube import Kube
from everloop_gateway.routing import Binding, Claim, Settle
from everloop_operator.api import names

CACHED = 100_000
LINEAGE_PREFIX = "evl-"
FIELD_LINEAGE = "lineage"
FIELD_JOB = "jobUID"


class Bindings:
    """Reads and creates bindings, with a cache that is never stale since they never change."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._cache: OrderedDict[tuple[str, str], Binding] = OrderedDict()
        self._lineages: dict[str, str] = {}

    async def get(self, namespace: str, stream: Stream) -> Binding | None:
        """The binding of a stream; None if it has none. Raises ApiUnavailable, ApiRefused."""
        cached = self._cache.get((namespace, stream.id))
        if cached is not None:
            self._cache.move_to_end((namespace, stream.id))
            return cached
        resource = await self._kube.get(f"{_path(namespace)}/{stream.binding_name}")
        if resource is None:
            return None
        binding = _from_config_map(resource)
        return None if binding is None or binding.id != stream.id else self._remember(binding)

    async def ensure(self, stream: Stream, binding: Binding) -> Binding:
        """Create a binding, or adopt the one that is there. Raises ApiUnavailable, ApiRefused."""
        body = _to_config_map(stream, binding)
        if await self._kube.create(_path(binding.namespace), body, names.GATEWAY_FIELD_MANAGER) is not None:
            return self._remember(binding)
        existing = await self.get(binding.namespace, stream)
        # It can only be missing if its claim was deleted between the two calls.
        return binding if existing is None else existing

    async def settle(self, binding: Binding, found: Settle) -> Binding:
        """Give a binding its lineage: the one recorded for its TrainingSession, else the one found, which is recorded.

        Raises ApiUnavailable, ApiRefused.
        """
        lineage = self._lineages.get(binding.uid)
        if lineage is None:
            lineage = await self._recorded_lineage(binding, found)
            self._lineages[binding.uid] = lineage
        return self._remember(replace(binding, lineage=lineage))

    async def _recorded_lineage(self, binding: Binding, found: Settle) -> str:
        path, name = _path(binding.namespace), f"{LINEAGE_PREFIX}{binding.uid}"
        body = _config_map(name, binding, names.TYPE_LINEAGE, found.claim, {FIELD_LINEAGE: found.lineage})
        while True:
            if await self._kube.create(path, body, names.GATEWAY_FIELD_MANAGER) is not None:
                return found.lineage
            recorded = await self._kube.get(f"{path}/{name}")
            if recorded is not None:
                # One that somebody else has made of that name has no lineage, and no session's is equal to that.
                return str((recorded.get("data") or {}).get(FIELD_LINEAGE, ""))

    def _remember(self, binding: Binding) -> Binding:
        self._cache[(binding.namespace, binding.id)] = binding
        if len(self._cache) > CACHED:
            self._cache.popitem(last=False)
        return binding


def _path(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/configmaps"


def _to_config_map(stream: Stream, binding: Binding) -> dict[str, Any]:
    data = {
        "id": binding.id,
        "session": binding.session,
        "uid": binding.uid,
        "baseModel": binding.base_model,
        "keyId": binding.key_id,
        "claim": binding.claim.name,
        "claimUID": binding.claim.uid,
    }
    if binding.weights is not None:
        data["weights"] = binding.weights
    if binding.job:
        data[FIELD_JOB] = binding.job
    if binding.lineage is not None:
        data[FIELD_LINEAGE] = binding.lineage
    return _config_map(stream.binding_name, binding, names.TYPE_BINDING, binding.claim, data)


def _config_map(name: str, binding: Binding, kind: str, owner: Claim, data: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": name,
            "namespace": binding.namespace,
            "labels": {
                names.LABEL_TYPE: kind,
                names.LABEL_SESSION: binding.session,
                names.LABEL_MANAGED_BY: names.MANAGED_BY,
            },
            "ownerReferences": [
                {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "name": owner.name, "uid": owner.uid}
            ],
        },
        "immutable": True,
        "data": data,
    }


def _from_config_map(resource: dict[str, Any]) -> Binding | None:
    """The binding in a ConfigMap; None where somebody else has made one of that name."""
    data = resource.get("data") or {}
    if not data.keys() >= {"id", "session", "uid", "baseModel", "keyId", "claim", "claimUID"}:
        return None
    return Binding(
        id=data["id"],
        namespace=resource["metadata"]["namespace"],
        session=data["session"],
        uid=data["uid"],
        base_model=data["baseModel"],
        weights=data.get("weights"),
        key_id=data["keyId"],
        claim=Claim(data["claim"], data["claimUID"]),
        lineage=data.get(FIELD_LINEAGE),
        job=data.get(FIELD_JOB, ""),
    )
