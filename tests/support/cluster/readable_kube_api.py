"""An API server for somebody who only reads: objects by path with label selectors, logs, and the proxy to real pods.

It asks for a token like a real one, refuses what it is told to refuse with a Status object, and notes every path.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import httpx

from processes.loopback_server import loopback_server

TOKEN = "planted-kubeconfig-token-1"


@dataclass
class ReadableKubeApi:
    """`objects` are lists by path, `texts` other answers by path, `refused` beginnings of paths that get a 403."""

    url: str = ""
    objects: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    ports: dict[str, int] = field(default_factory=dict)
    """Where `<pod>:<port>` listens really, for what can't have the port of a cluster here."""
    paths: list[str] = field(default_factory=list)
    _http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=60, trust_env=False, verify=False))

    def write_kubeconfig(self, file: Path, namespace: str) -> Path:
        """A kubeconfig that leads here."""
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
            "users": [{"name": "me", "user": {"token": TOKEN}}],
            "contexts": [{"name": "lab", "context": {"cluster": "fake", "user": "me", "namespace": namespace}}],
            "current-context": "lab",
        }
        file.write_text(json.dumps(config))
        return file

    def answer(self, path: str, query: Mapping[str, str]) -> tuple[int, str]:
        """Status and body of a GET."""
        if any(path.startswith(each) for each in self.refused):
            return 403, json.dumps({"kind": "Status", "message": f"{path} is forbidden to user me", "code": 403})
        if "/proxy/" in path:
            return self._through_proxy(path)
        if path in self.texts:
            return 200, self.texts[path]
        if path in self.objects:
            items = [one for one in self.objects[path] if selected(one, query.get("labelSelector", ""))]
            return 200, json.dumps({"metadata": {}, "items": items})
        return 404, json.dumps({"kind": "Status", "message": "the server could not find the requested resource"})

    def _through_proxy(self, path: str) -> tuple[int, str]:
        pods, _, rest = path.partition("/pods/")
        target, _, page = rest.partition("/proxy/")
        name, _, port = target.partition(":")
        port = str(self.ports.get(target, port))
        pod = next((one for one in self.objects[f"{pods}/pods"] if one["metadata"]["name"] == name), None)
        if pod is None:
            return 404, json.dumps({"message": f'pods "{name}" not found'})
        try:
            answer = self._http.get(f"http://{pod['status']['podIP']}:{port}/{page}")
        except httpx.HTTPError as error:
            return 503, json.dumps({"message": f"error trying to reach service: {error}"})
        return answer.status_code, answer.text


def selected(one: Mapping[str, Any], selector: str) -> bool:
    """Whether an object's labels fit `key`, `key=value` and `key in (a, b)`, joined by commas."""
    own = one.get("metadata", {}).get("labels", {})
    return all(_fits(own, term.strip()) for term in _terms(selector))


def _terms(selector: str) -> Sequence[str]:
    found, depth, current = [], 0, ""
    for letter in selector:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            found.append(current)
            current = ""
        else:
            current += letter
    return [*found, current] if current else found


def _fits(own: Mapping[str, str], term: str) -> bool:
    if " in " in term:
        key, _, values = term.partition(" in ")
        return own.get(key) in [value.strip() for value in values.strip("()").split(",")]
    key, equals, value = term.partition("=")
    return own.get(key) == value if equals else key in own


@contextmanager
def readable_kube_api() -> Iterator[ReadableKubeApi]:
    """One that serves until the context ends."""
    api = ReadableKubeApi()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            api.paths.append(parts.path)
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            path = unquote(parts.path)
            if "/proxy/" in path and parts.query:
                path += f"?{parts.query}"
            allowed = self.headers["Authorization"] == f"Bearer {TOKEN}"
            status, text = api.answer(path, query) if allowed else (401, json.dumps({"message": "Unauthorized"}))
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with loopback_server(Handler) as api.url:
        yield api
    api._http.close()
