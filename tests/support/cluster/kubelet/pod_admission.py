"""Gets a pod ready for the process node: its ConfigMaps and Secrets, and its ServiceAccount's kubeconfig."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from cluster.kubelet.api_access import ApiAccess
from cluster.kubelet.api_client import ApiClient
from cluster.kubelet.local_form import ACCOUNT_FILE, add_account, local_form, referenced_objects
from stageline_local.session.object_store import ObjectStore

_TOKEN_SECONDS: Final = 86400
"""Tokens are not renewed: a pod that talks to the API server for longer than a day is not for this node."""
_COLLECTIONS: Final = {"ConfigMap": "configmaps", "Secret": "secrets"}


class PodAdmission:
    """Prepares the pods of one node; `store` is where the process node looks objects up."""

    def __init__(self, client: ApiClient, access: ApiAccess, store: ObjectStore, accounts_dir: Path) -> None:
        self._client = client
        self._access = access
        self._store = store
        self._accounts_dir = accounts_dir

    async def prepare(self, pod: Mapping[str, Any]) -> dict[str, Any]:
        """The manifest for the process node, with all that can be fetched fetched."""
        local = local_form(pod)
        await self.fetch_references(local.manifest)
        if local.service_account is not None:
            directory = self._accounts_dir / pod["metadata"]["uid"]
            await self._write_kubeconfig(pod, local.service_account, directory)
            add_account(local.manifest, directory)
        return local.manifest

    async def fetch_references(self, manifest: Mapping[str, Any]) -> None:
        """Read every ConfigMap and Secret that the pod names, as they are now."""
        namespace = manifest["metadata"]["namespace"]
        for kind, name in sorted(referenced_objects(manifest)):
            found = await self._client.get(f"/api/v1/namespaces/{namespace}/{_COLLECTIONS[kind]}/{name}")
            if found is None:
                self._store.delete(kind, namespace, name)
            else:
                self._store.apply({**found, "kind": kind})

    async def _write_kubeconfig(self, pod: Mapping[str, Any], account: str, directory: Path) -> None:
        metadata = pod["metadata"]
        namespace = metadata["namespace"]
        bound = {"apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "uid": metadata["uid"]}
        request = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": _TOKEN_SECONDS, "boundObjectRef": bound},
        }
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        token = (await self._client.create(path, request))["status"]["token"]
        cluster = {"server": self._access.url, "certificate-authority-data": self._access.authority_base64}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "pod",
            "contexts": [{"name": "pod", "context": {"cluster": "own", "user": account, "namespace": namespace}}],
            "clusters": [{"name": "own", "cluster": cluster}],
            "users": [{"name": account, "user": {"token": token}}],
        }
        _write_private(directory, json.dumps(config))


def _write_private(directory: Path, text: str) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = directory / ACCOUNT_FILE
    file.touch(mode=0o600)
    file.write_text(text, encoding="utf-8")
