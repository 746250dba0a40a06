"""An API server with just what a watcher sees of one: lists with a version, and watches that stream what comes after.

There is nothing of kinds that no test has put, and nobody may write. It tells which kinds it has, and it can also do
what real ones do at bad moments: forget to tell of a deletion, refuse a version as too old, refuse watches, fail.
"""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from processes.loopback_server import loopback_server
from stageline_operator.controller.client.resources import RESOURCES, Resource

PODS = "/api/v1/namespaces/here/pods"
SECRETS = "/api/v1/namespaces/here/secrets"
MODELS = "/apis/stageline.dev/v1alpha1/namespaces/here/pipelinemodels"
ELSEWHERE = {path: path.replace("/here/", "/there/") for path in (PODS, SECRETS, MODELS)}
"""The same paths of another namespace."""
_DISCOVERED = (
    *RESOURCES,
    Resource("Namespace", "", "v1", "namespaces", (), namespaced=False),
    Resource("CustomResourceDefinition", "apiextensions.k8s.io", "v1", "customresourcedefinitions", ()),
)
"""The operator's, and those that kopf waits for before it begins."""
_MESSAGES = {410: "too old resource version", 500: "the watch failed"}
"""What the ERROR event of a watch says, by its code."""
LONGEST_WATCH_SECONDS = 300.0
"""Where the watcher sets no end."""


def _no_objects() -> dict[str, dict[str, dict[str, Any]]]:
    return {path: {} for here, there in ELSEWHERE.items() for path in (here, there)}


@dataclass
class FakeKubeApi:
    """Objects by path and name; every change gets the next version."""

    url: str = ""
    fails: bool = False
    refuses_watches: bool = False
    """As of somebody whose role allows lists only."""
    unwatchable: set[str] = field(default_factory=set)
    """Beginnings of paths that may be listed and not watched."""
    forbidden: set[str] = field(default_factory=set)
    """Beginnings of paths that nobody here may read."""
    broken: set[str] = field(default_factory=set)
    """Beginnings of paths that are answered with 500."""
    silent: set[str] = field(default_factory=set)
    """Beginnings of paths that get no answer."""
    objects: dict[str, dict[str, dict[str, Any]]] = field(default_factory=_no_objects)
    requests: list[str] = field(default_factory=list)
    """Path and query of each, in order."""
    _version: int = 1
    _too_old: int = 0
    _code: int = 410
    _events: list[tuple[int, str, str, dict[str, Any]]] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _stopped: bool = False

    def put(self, path: str, manifest: dict[str, Any]) -> None:
        """Create or replace an object, and tell."""
        name = manifest["metadata"]["name"]
        manifest = manifest | {"metadata": {"uid": f"uid-{name}", **manifest["metadata"]}}
        kind = "MODIFIED" if name in self.objects[path] else "ADDED"
        self.objects[path][name] = manifest
        self._tell(kind, path, manifest)

    def delete(self, path: str, name: str, silently: bool = False) -> None:
        """Delete an object; `silently` when no watcher shall ever hear of it."""
        gone = self.objects[path].pop(name)
        if not silently:
            self._tell("DELETED", path, gone)

    def expire(self) -> None:
        """Refuse every version so far as too old, and end the watches that use them."""
        self._end_watches(410)

    def fail_watches(self) -> None:
        """End the watches under way with an error that none of them expects."""
        self._end_watches(500)

    def watches(self, path: str) -> int:
        """How many watches of a path were begun."""
        return sum(asked.startswith(f"{path}?") and "watch=true" in asked for asked in self.requests)

    def write_kubeconfig(self, path: Path) -> None:
        """A kubeconfig that leads here."""
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
            "users": [{"name": "me", "user": {"token": "secret-token"}}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "me"}}],
            "current-context": "fake",
        }
        path.write_text(json.dumps(config))

    def _end_watches(self, code: int) -> None:
        with self._changed:
            self._too_old = self._version = self._version + 1
            self._code = code
            self._changed.notify_all()

    def _tell(self, kind: str, path: str, manifest: dict[str, Any]) -> None:
        with self._changed:
            self._version += 1
            self._events.append((self._version, kind, path, manifest))
            self._changed.notify_all()

    def listing(self, path: str) -> dict[str, Any]:
        """A list, and the version it shows."""
        with self._changed:
            return {
                "metadata": {"resourceVersion": str(self._version)},
                "items": list(self.objects.get(path, {}).values()),
            }

    def named(self, path: str) -> tuple[int, dict[str, Any]] | None:
        """Status and body, where `path` asks for one object by its name."""
        collection, _, name = path.rpartition("/")
        if collection not in self.objects:
            return None
        found = self.objects[collection].get(name)
        absent = {"kind": "Status", "code": 404, "reason": "NotFound", "message": f"{name} is not there"}
        return (404, absent) if found is None else (200, found)

    def discovery(self, path: str) -> dict[str, Any] | None:
        """What there is of groups, versions and kinds, where `path` asks for that."""
        versions = {each.group: each.version for each in _DISCOVERED}
        if path == "/api":
            return {"versions": ["v1"]}
        if path == "/apis":
            named = [(group, {"version": version}) for group, version in versions.items() if group]
            return {"groups": [{"name": name, "versions": [one], "preferredVersion": one} for name, one in named]}
        kinds = [
            {
                "name": each.plural,
                "singularName": "",
                "kind": each.kind,
                "namespaced": each.namespaced,
                "verbs": each.verbs,
            }
            for each in _DISCOVERED
            if path == each.path().rpartition("/")[0]
        ]
        return {"resources": kinds} if kinds else None

    def watch(self, path: str, since: int, seconds: float) -> Iterator[dict[str, Any]]:
        """Events of a path after a version, for so long."""
        deadline, told = time.monotonic() + seconds, since
        while (left := deadline - time.monotonic()) > 0 and not self._stopped:
            with self._changed:
                if since < self._too_old:
                    yield {"type": "ERROR", "object": {"code": self._code, "message": _MESSAGES[self._code]}}
                    return
                new = [event for event in self._events if event[0] > told]
                if not new:
                    self._changed.wait(min(left, 0.1))
            for version, kind, where, manifest in new:
                told = version
                if where == path:
                    yield {"type": kind, "object": manifest}


@contextmanager
def fake_kube_api() -> Iterator[FakeKubeApi]:
    """One that serves until the context ends."""
    api = FakeKubeApi()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.headers["Authorization"] == "Bearer secret-token"
            api.requests.append(self.path)
            parts = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            while parts.path.startswith(tuple(api.silent)) and not api._stopped:
                time.sleep(0.05)
            may_watch = not (api.refuses_watches or parts.path.startswith(tuple(api.unwatchable)))
            refused = ("watch" in query and not may_watch) or parts.path.startswith(tuple(api.forbidden))
            fails = api.fails or parts.path.startswith(tuple(api.broken))
            status, one = api.named(parts.path) or (200, None)
            self.send_response(500 if fails else 403 if refused else status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            if fails or refused:
                return
            try:
                if "watch" not in query:
                    answer = one or api.discovery(parts.path) or api.listing(parts.path)
                    self.wfile.write(json.dumps(answer).encode())
                    return
                seconds = float(query.get("timeoutSeconds", LONGEST_WATCH_SECONDS))
                for event in api.watch(parts.path, int(query["resourceVersion"]), seconds):
                    self.wfile.write(json.dumps(event).encode() + b"\n")
            except (BrokenPipeError, ConnectionResetError):
                pass  # the watcher left

        def refuse(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = json.dumps({"kind": "Status", "code": 403, "reason": "Forbidden", "message": "read only"}).encode()
            self.send_response(403)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_PATCH = do_PUT = do_DELETE = refuse  # noqa: N815 - http.server's names

        def log_message(self, *_: Any) -> None:
            pass

    with loopback_server(Handler) as api.url:
        yield api
        api._stopped = True
