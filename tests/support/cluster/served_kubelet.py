"""What `kubectl logs` and `port-forward` reach of a kubelet through the API server, for nodes of a test cluster.

Process nodes keep no times in their logs, so `sinceSeconds` is taken to reach back to the beginning. A container that
was not started again has no log of before: that is refused in a kubelet's words. A forwarded port is opened and carries
nothing.
"""

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final
from urllib.parse import parse_qs, urlsplit

from cluster.control_plane import ControlPlane
from cluster.simulated_nodes import SimulatedNodes
from cluster.under_test import Cluster

ADDRESS_OPTION: Final = "--kubelet-preferred-address-types=InternalIP"
"""For the API server: names of process nodes are nothing that can be looked up."""


class _Handler(BaseHTTPRequestHandler):
    nodes: SimulatedNodes
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        asked = {name: values[-1] for name, values in parse_qs(url.query).items()}
        match url.path.strip("/").split("/"):
            case ["containerLogs", _, pod, container] if asked.get("previous") == "true":
                words = f'previous terminated container "{container}" in pod "{pod}" not found'
                self._send(HTTPStatus.BAD_REQUEST, words)
            case ["containerLogs", namespace, pod, container]:
                log = "".join(node.container_log(namespace, pod, container) for node in self.nodes.by_name.values())
                self._send(HTTPStatus.OK, _last(log, asked.get("tailLines")))
            case _:
                self._send(HTTPStatus.NOT_FOUND, "these nodes give out logs alone")

    def do_POST(self) -> None:
        """Accept a port-forward; nothing is sent through it."""
        self.send_response(HTTPStatus.SWITCHING_PROTOCOLS)
        asked = ("Upgrade", "X-Stream-Protocol-Version")
        for name, value in (("Connection", "Upgrade"), *((name, self.headers[name]) for name in asked)):
            self.send_header(name, value)
        self.end_headers()
        while self.rfile.read1():
            pass
        self.close_connection = True

    def _send(self, status: HTTPStatus, text: str) -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Who looks sees the answer."""


def _last(text: str, lines: str | None) -> str:
    """The last `lines` of a text; all of it when that is not said."""
    return "".join(text.splitlines(keepends=True)[-int(lines) :]) if lines else text


@contextmanager
def served_kubelet(cluster: Cluster, plane: ControlPlane, nodes: SimulatedNodes) -> Iterator[None]:
    """Every node that there is says that its kubelet listens here, for the length of the block."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"nodes": nodes}))
    server.daemon_threads = True
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*plane.serving_certificate)
    server.socket = tls.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, name="served-kubelet", daemon=True).start()
    endpoints = {"status": {"daemonEndpoints": {"kubeletEndpoint": {"Port": server.server_address[1]}}}}
    try:
        for name in nodes.by_name:
            cluster.kubectl_ok(
                "patch", "node", name, "--subresource=status", "--type=merge", "-p", json.dumps(endpoints)
            )
        yield
    finally:
        server.shutdown()
        server.server_close()
