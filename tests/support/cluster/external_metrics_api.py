"""An API server of external metrics, as an adapter runs one beside Prometheus, joined to a control plane of our own.

It answers with what engines' metric pages say, and only for a selector that the page's own labels meet. The real
aggregator leads to it through a Service of type ExternalName, the one kind that may name a loopback address.
"""

import json
import ssl
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families

from cluster.api import wait_until
from cluster.control_plane import ControlPlane
from cluster.under_test import Cluster

GROUP: Final = "external.metrics.k8s.io"
VERSION: Final = "v1beta1"
_API_SERVICE: Final = f"{VERSION}.{GROUP}"
_SERVICE: Final = {"name": "external-metrics", "namespace": "default"}
_READY_SECONDS: Final = 150.0


@dataclass
class ExternalMetrics:
    """`page` gives a metric page in Prometheus' text form; `asked` are the queries that came, newest last."""

    page: Callable[[], str]
    asked: list[str] = field(default_factory=list)

    def answer(self, metric: str, selector: str) -> dict[str, Any]:
        """All samples of a metric that carry the labels of `a=b,c=d`."""
        wanted = dict(pair.split("=", 1) for pair in selector.split(",") if pair)
        samples = (s for family in text_string_to_metric_families(self.page()) for s in family.samples)
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        items = [
            {"metricName": metric, "metricLabels": each.labels, "timestamp": now, "value": f"{each.value:g}"}
            for each in samples
            if each.name == metric and wanted.items() <= each.labels.items()
        ]
        return {"kind": "ExternalMetricValueList", "apiVersion": f"{GROUP}/{VERSION}", "metadata": {}, "items": items}


class _Handler(BaseHTTPRequestHandler):
    metrics: ExternalMetrics
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        match url.path.strip("/").split("/"):
            case ["apis", group, version] if (group, version) == (GROUP, VERSION):
                self._send(HTTPStatus.OK, _RESOURCES)
            case ["apis", _, _, "namespaces", _, metric]:
                self.metrics.asked.append(self.path)
                selector = urllib.parse.parse_qs(url.query).get("labelSelector", [""])[0]
                self._send(HTTPStatus.OK, self.metrics.answer(metric, selector))
            case _:
                self._send(HTTPStatus.NOT_FOUND, {"kind": "Status", "apiVersion": "v1", "status": "Failure"})

    def _send(self, status: HTTPStatus, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Queries are kept in `asked`."""


_RESOURCES: Final = {
    "kind": "APIResourceList",
    "apiVersion": "v1",
    "groupVersion": f"{GROUP}/{VERSION}",
    "resources": [],
}


@contextmanager
def external_metrics(cluster: Cluster, plane: ControlPlane, page: Callable[[], str]) -> Iterator[ExternalMetrics]:
    """Served through the API server for the length of the block."""
    metrics = ExternalMetrics(page)
    handler = type("Handler", (_Handler,), {"metrics": metrics})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*plane.serving_certificate)
    # A client that is slow to greet waits in its own thread, and not with everyone behind it.
    server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=server.serve_forever, name="external-metrics", daemon=True).start()
    port = server.server_address[1]
    try:
        cluster.apply(*_manifests(port))
        wait_until(
            "external metrics are served",
            lambda: cluster.kubectl("get", "--raw", f"/apis/{GROUP}/{VERSION}").returncode == 0,
            _READY_SECONDS,
            lambda: cluster.kubectl_ok("get", "apiservice", _API_SERVICE, "-o", "yaml"),
        )
        yield metrics
    finally:
        # A namespace can't be deleted while an API is announced that doesn't answer.
        cluster.kubectl_ok("delete", "apiservice", _API_SERVICE, "--ignore-not-found")
        cluster.kubectl_ok("delete", "service", _SERVICE["name"], "-n", _SERVICE["namespace"], "--ignore-not-found")
        server.shutdown()
        server.server_close()


def _manifests(port: int) -> list[dict[str, Any]]:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _SERVICE,
        "spec": {"type": "ExternalName", "externalName": "127.0.0.1"},
    }
    announced = {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": _API_SERVICE},
        "spec": {
            "group": GROUP,
            "version": VERSION,
            "service": _SERVICE | {"port": port},
            "insecureSkipTLSVerify": True,
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
        },
    }
    return [service, announced]
