"""Bindings: which TrainingSession a stream belongs to, in one immutable ConfigMap each."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from everloop_gateway.ids import Stream
from everloop_gateway.kube import Kube
from everloop_gateway.routing import Binding
from everloop_operator.api import names

CACHED = 100_000


class Bindings:
    """Reads and creates bindings, with a cache that is never stale since they never change."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._cache: OrderedDict[tuple[str, str], Binding] = OrderedDict()

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
        # It can only be missing if its TrainingSession was deleted between the two calls.
        return binding if existing is None else existing

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
    }
    if binding.weights is not None:
        data["weights"] = binding.weights
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": stream.binding_name,
            "namespace": binding.namespace,
            "labels": {
                names.LABEL_TYPE: names.TYPE_BINDING,
                names.LABEL_SESSION: binding.session,
                names.LABEL_MANAGED_BY: names.MANAGED_BY,
            },
            "ownerReferences": [
                {
                    "apiVersion": names.API_VERSION,
                    "kind": names.TRAINING_SESSION_KIND,
                    "name": binding.session,
                    "uid": binding.uid,
                }
            ],
        },
        "immutable": True,
        "data": data,
    }


def _from_config_map(resource: dict[str, Any]) -> Binding | None:
    """The binding in a ConfigMap; None where somebody else has made one of that name."""
    data = resource.get("data") or {}
    if not data.keys() >= {"id", "session", "uid", "baseModel", "keyId"}:
        return None
    return Binding(
        id=data["id"],
        namespace=resource["metadata"]["namespace"],
        session=data["session"],
        uid=data["uid"],
        base_model=data["baseModel"],
        weights=data.get("weights"),
        key_id=data["keyId"],
    )
