"""An admission webhook in the test's process, which allows whatever it is asked about, after a while."""

import base64
import json
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from cluster.control_plane import ControlPlane
from cluster.under_test import Cluster

_CONFIGURATION = "ValidatingWebhookConfiguration"


@contextmanager
def slow_webhook(plane: ControlPlane, seconds: float) -> Iterator[dict[str, Any]]:
    """One that takes so long over each answer; yields the `clientConfig` that leads to it."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            time.sleep(seconds)
            response = {"uid": asked["request"]["uid"], "allowed": True}
            body = json.dumps({**asked, "request": None, "response": response}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            try:
                self.wfile.write(body)
            except OSError:
                pass  # the API server has given up

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    certificate, key = plane.serving_certificate
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, name="admission-webhook", daemon=True)
    thread.start()
    bundle = base64.b64encode(certificate.read_bytes()).decode()
    try:
        yield {"url": f"https://127.0.0.1:{server.server_address[1]}/", "caBundle": bundle}
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


DEAD = {"url": "https://127.0.0.1:1/"}
"""`clientConfig` of a webhook at which nobody listens."""


@contextmanager
def asks_before_pods_are_made(cluster: Cluster, namespace: str, client_config: dict[str, Any]) -> Iterator[None]:
    """The API server asks a webhook about each new pod of a namespace, as long as the block lasts."""
    name = f"pods-{namespace}"[:60].strip("-")
    hook = {
        "name": f"{name}.example.org",
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "timeoutSeconds": 30,
        "failurePolicy": "Fail",
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "clientConfig": client_config,
        "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"]}],
    }
    metadata = {"name": name}
    api_version = "admissionregistration.k8s.io/v1"
    cluster.apply({"apiVersion": api_version, "kind": _CONFIGURATION, "metadata": metadata, "webhooks": [hook]})
    try:
        yield
    finally:
        cluster.kubectl_ok("delete", _CONFIGURATION.lower(), name)
