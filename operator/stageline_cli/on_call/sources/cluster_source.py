"""Models of a cluster: PipelineModels, pods and gateways from the API server, and HTTP access to the pods.

`reach` is the way to the pods: through the API server's proxy (from anywhere), or at their addresses (from inside the
cluster). Without that access the objects alone still give most facts.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

import httpx

from stageline_api import env, labels, ports
from stageline_api.errors import UserError
from stageline_cli.on_call.sources.cluster_pieces import cluster_pieces
from stageline_cli.on_call.sources.source import Endpoint, Manifest, ModelObjects, Piece
from stageline_kubernetes.errors import ApiError
from stageline_kubernetes.reader import TIMEOUT_SECONDS, ApiServer

GROUP_PATH: Final = "/apis/stageline.dev/v1alpha1"
GATEWAYS: Final = f"{labels.APP_NAME}=stageline,{labels.APP_COMPONENT}=gateway"
_PAGE: Final = "500"
PodOf = Callable[[str], tuple[str, str] | None]
"""(namespace, name) of the pod with an address; None if it is unknown."""
_HTTP_DEFAULT_PORT: Final = 80


class Reach(StrEnum):
    PROXY = "proxy"
    """Through the API server; needs the right `get` on `pods/proxy`."""
    DIRECT = "direct"
    """At their own addresses; for inside the cluster."""


class PodProxy(httpx.BaseTransport):
    """Reaches pods through the API server (`pods/proxy`), without a network route into the cluster.

    A request for `http://<pod IP>:<port>/<path>` goes to the API server's proxy of that pod.
    """

    def __init__(self, api: ApiServer, pod_of: PodOf) -> None:
        self._api = api
        self._pod_of = pod_of

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send one GET. Raises `httpx.ConnectError` for an unknown address, or if the API server refuses."""
        pod = self._pod_of(request.url.host)
        if pod is None:
            raise httpx.ConnectError(f"no pod has the address {request.url.host}", request=request)
        namespace, name = pod
        port = request.url.port or _HTTP_DEFAULT_PORT
        path = f"/api/v1/namespaces/{namespace}/pods/{name}:{port}/proxy{request.url.raw_path.decode()}"
        try:
            # Without a limit the API server waits half a minute for a pod that it can't reach.
            limit_seconds = request.extensions.get("timeout", {}).get("read") or TIMEOUT_SECONDS
            return httpx.Response(200, content=self._api.get(path, timeout_seconds=limit_seconds), request=request)
        except ApiError as error:
            raise httpx.ConnectError(f"through the API server: {error}", request=request) from error


class ClusterSource:
    def __init__(self, api: ApiServer, namespace: str | None, reach: Reach) -> None:
        self._api = api
        self._namespace = namespace
        self._pod_of: dict[str, tuple[str, str]] = {}
        proxy = PodProxy(api, self._pod_of.get) if reach is Reach.PROXY else None
        self._http = httpx.Client(trust_env=False, verify=False, transport=proxy)

    @property
    def where(self) -> str:
        namespace = "all namespaces" if self._namespace is None else f"namespace {self._namespace}"
        return f"cluster {self._api.context}, {namespace}"

    @property
    def http(self) -> httpx.Client:
        return self._http

    @property
    def secrets(self) -> Sequence[str]:
        return self._api.secrets

    def close(self) -> None:
        self._http.close()
        self._api.close()

    def models(self, name: str | None) -> list[ModelObjects]:
        manifests = [one for one in self._models() if name is None or one["metadata"]["name"] == name]
        problems: list[str] = []
        namespaces = sorted({one["metadata"]["namespace"] for one in manifests})
        pods = [pod for namespace in namespaces for pod in self._pods(namespace, labels.MODEL, problems)]
        gateways = self._gateways(namespaces, problems) if manifests else []
        self._pod_of.update(
            (pod["status"]["podIP"], (pod["metadata"]["namespace"], pod["metadata"]["name"]))
            for pod in (*pods, *gateways)
            if pod.get("status", {}).get("podIP")
        )
        return [
            ModelObjects(
                manifest=one,
                pods=_of_model(pods, one),
                gateways=_serving(gateways, one["metadata"]["namespace"]),
                problems=tuple(problems),
            )
            for one in manifests
        ]

    def pieces(self, model: ModelObjects) -> Iterable[Piece]:
        return cluster_pieces(self._api, model, datetime.now(UTC))

    def _models(self) -> list[dict[str, Any]]:
        scope = "" if self._namespace is None else f"/namespaces/{self._namespace}"
        try:
            found = self._api.get_json(f"{GROUP_PATH}{scope}/pipelinemodels", limit=_PAGE)["items"]
        except ApiError as error:
            if error.is_not_found:
                raise UserError(f"{self.where}: the PipelineModel CRD is missing; is the chart installed?") from error
            raise UserError(f"{self.where}: PipelineModels can't be read: {error}") from error
        return sorted(found, key=lambda one: (one["metadata"]["namespace"], one["metadata"]["name"]))

    def _gateways(self, namespaces: Sequence[str], problems: list[str]) -> list[dict[str, Any]]:
        """Gateways may run in another namespace than their models; a user without access there only sees those beside
        them.
        """
        try:
            return list(self._api.get_json("/api/v1/pods", labelSelector=GATEWAYS)["items"])
        except ApiError as error:
            found = [pod for namespace in namespaces for pod in self._pods(namespace, GATEWAYS, problems)]
            if not found:
                problems.append(f"no gateway runs beside the models, and other namespaces can't be read: {error}")
            return found

    def _pods(self, namespace: str, selector: str, problems: list[str]) -> list[dict[str, Any]]:
        path = f"/api/v1/namespaces/{namespace}/pods"
        try:
            return list(self._api.get_json(path, labelSelector=selector)["items"])
        except ApiError as error:
            problems.append(f"pods ({selector}) of namespace {namespace} can't be read: {error}")
            return []


def _of_model(pods: Sequence[Manifest], manifest: Manifest) -> tuple[Manifest, ...]:
    own = manifest["metadata"]
    return tuple(
        pod
        for pod in pods
        if pod["metadata"]["namespace"] == own["namespace"]
        and pod["metadata"].get("labels", {}).get(labels.MODEL) == own["name"]
    )


def _serving(gateways: Sequence[Manifest], namespace: str) -> tuple[Endpoint, ...]:
    """Running gateways of a namespace's models."""
    found = []
    for pod in gateways:
        address = pod.get("status", {}).get("podIP", "")
        if address and pod["status"].get("phase") == "Running" and namespace in served_namespaces(pod):
            host = f"[{address}]" if ":" in address else address
            found.append(Endpoint(pod["metadata"]["name"], f"http://{host}:{ports.GATEWAY_ADMIN}"))
    return tuple(found)


def served_namespaces(gateway: Manifest) -> frozenset[str]:
    """Namespaces that a gateway's pod serves: from its arguments, else its environment, else its own."""
    named: list[str] = []
    for container in gateway["spec"]["containers"]:
        words = [str(word).partition("=") for word in (*container.get("command", []), *container.get("args", []))]
        given = [value for option, _, value in words if option == "--namespace"]
        variables = {one["name"]: one.get("value") or "" for one in container.get("env", [])}
        named += given or [variables.get(env.GATEWAY_NAMESPACES, "")]
    found = frozenset(name for text in named for name in text.replace(",", " ").split())
    return found or frozenset({str(gateway["metadata"]["namespace"])})
