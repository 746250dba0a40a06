"""Reaches pods through the API server (`pods/proxy`), so that a laptop needs no network route into the cluster.

An httpx transport: a request for `http://<pod IP>:<port>/<path>` goes to the API server's proxy of that pod.
"""

from collections.abc import Callable
from typing import Final

import httpx

from stageline_kubernetes.errors import ApiError
from stageline_kubernetes.reader import TIMEOUT_SECONDS, ApiServer

PodOf = Callable[[str], tuple[str, str] | None]
"""(namespace, name) of the pod with an address; None when it is not known."""
_HTTP_DEFAULT_PORT: Final = 80


class PodProxy(httpx.BaseTransport):
    def __init__(self, api: ApiServer, pod_of: PodOf) -> None:
        self._api = api
        self._pod_of = pod_of

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send one GET. Raises `httpx.ConnectError` for an unknown address, or when the API server refuses."""
        pod = self._pod_of(request.url.host)
        if pod is None:
            raise httpx.ConnectError(f"no pod has the address {request.url.host}", request=request)
        namespace, name = pod
        port = request.url.port or _HTTP_DEFAULT_PORT
        path = f"/api/v1/namespaces/{namespace}/pods/{name}:{port}/proxy{request.url.raw_path.decode()}"
        try:
            # The API server itself would wait half a minute for a pod that it can't reach.
            limit_seconds = request.extensions.get("timeout", {}).get("read") or TIMEOUT_SECONDS
            return httpx.Response(200, content=self._api.get(path, timeout_seconds=limit_seconds), request=request)
        except ApiError as error:
            raise httpx.ConnectError(f"through the API server: {error}", request=request) from error
