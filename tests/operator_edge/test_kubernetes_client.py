"""The shared client before a real HTTP server: what it sends, what it sends again, and what it makes of refusals."""

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from cluster.fake_kube_api import PODS, fake_kube_api
from processes.loopback_server import loopback_server
from stageline_kubernetes.client import JSON, MERGE_PATCH, KubeApi
from stageline_kubernetes.errors import ApiError
from stageline_kubernetes.login import load_configuration
from stageline_kubernetes.resources import ApiResource

POD = ApiResource("Pod", "", "v1", "pods")
LEASE = ApiResource("Lease", "coordination.k8s.io", "v1", "leases")
SECONDS = 60.0
MANIFEST = {"metadata": {"namespace": "here", "name": "p"}}


@dataclass
class ScriptedApi:
    """Answers with the next of `answers` (status, body, headers), then with 200; notes all that is sent."""

    url: str = ""
    answers: list[tuple[int, dict[str, Any], dict[str, str]]] = field(default_factory=list)
    hold: threading.Event = field(default_factory=threading.Event)
    """Until it is set, requests of `held_method` are not answered."""
    held_method: str = ""
    asked: threading.Event = field(default_factory=threading.Event)
    """Set by the first request."""
    sent: list[tuple[str, str, dict[str, str], Any]] = field(default_factory=list)


@contextmanager
def scripted_api() -> Iterator[ScriptedApi]:
    api = ScriptedApi()

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            api.sent.append((self.command, self.path, headers, json.loads(raw) if raw else None))
            api.asked.set()
            if self.command == api.held_method:
                api.hold.wait(SECONDS)
            status, body, more = api.answers.pop(0) if api.answers else (200, {"answered": True}, {})
            encoded = json.dumps(body).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(encoded)), **more}.items():
                self.send_header(name, value)
            try:
                self.end_headers()
                self.wfile.write(encoded)
            except (BrokenPipeError, ConnectionResetError):
                pass  # the client gave it up

        do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = answer  # noqa: N815 - http.server's names

        def log_message(self, *_: Any) -> None:
            pass

    with loopback_server(Handler) as api.url:
        try:
            yield api
        finally:
            api.hold.set()


def during(url: str, use: Callable[[KubeApi], Coroutine[Any, Any, Any]], tmp_path: Path, **options: Any) -> Any:
    """Run `use` with a client that logs in by a kubeconfig that leads to `url`."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "fake", "cluster": {"server": url}}],
        "users": [{"name": "me", "user": {"token": "secret-token"}}],
        "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "me"}}],
        "current-context": "fake",
    }
    file = tmp_path / "kubeconfig"
    file.write_text(json.dumps(config))

    async def scenario() -> Any:
        api = KubeApi(await load_configuration(file), user_agent="a-user", **options)
        try:
            return await use(api)
        finally:
            await api.close()

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    ("use", "method", "path", "content_type", "body"),
    [
        (lambda api: api.get(POD, "here", "p"), "GET", "/api/v1/namespaces/here/pods/p", JSON, None),
        (
            lambda api: api.create(POD, MANIFEST, {"fieldManager": "me"}),
            "POST",
            "/api/v1/namespaces/here/pods?fieldManager=me",
            JSON,
            MANIFEST,
        ),
        (
            lambda api: api.patch(LEASE, LEASE.path("here", "p"), {"spec": {}}, MERGE_PATCH, {}),
            "PATCH",
            "/apis/coordination.k8s.io/v1/namespaces/here/leases/p",
            MERGE_PATCH,
            {"spec": {}},
        ),
        (
            lambda api: api.replace(LEASE, MANIFEST),
            "PUT",
            "/apis/coordination.k8s.io/v1/namespaces/here/leases/p",
            JSON,
            MANIFEST,
        ),
        (
            lambda api: api.delete(POD, "here", "p", {"gracePeriodSeconds": 0}),
            "DELETE",
            "/api/v1/namespaces/here/pods/p",
            JSON,
            {"gracePeriodSeconds": 0},
        ),
    ],
    ids=["get", "create", "patch", "replace", "delete"],
)
def test_each_call_is_one_request_with_credentials_and_the_users_name(
    use: Callable[[KubeApi], Coroutine[Any, Any, Any]],
    method: str,
    path: str,
    content_type: str,
    body: Any,
    tmp_path: Path,
) -> None:
    asked: list[str] = []
    with scripted_api() as server:
        assert during(server.url, use, tmp_path, before_write=asked.append) == {"answered": True}
    [(sent_method, sent_path, headers, sent_body)] = server.sent
    assert (sent_method, sent_path, sent_body) == (method, path, body)
    assert (headers["authorization"], headers["user-agent"]) == ("Bearer secret-token", "a-user")
    assert headers.get("content-type", JSON) == content_type
    assert len(asked) == (method != "GET"), asked


def test_a_list_comes_in_pages_of_one_version(tmp_path: Path) -> None:
    with scripted_api() as server:
        server.answers = [
            (200, {"metadata": {"resourceVersion": "7", "continue": "more"}, "items": [{"name": "a"}]}, {}),
            (200, {"metadata": {"resourceVersion": "7"}, "items": [{"name": "b"}]}, {}),
        ]
        listing = during(server.url, lambda api: api.list(POD, "here", "stage=0"), tmp_path)
    assert ([each["name"] for each in listing.items], listing.version) == (["a", "b"], 7)
    assert ["continue=more" in path for _, path, _, _ in server.sent] == [False, True]
    assert all("labelSelector=stage%3D0" in path for _, path, _, _ in server.sent), server.sent


@pytest.mark.parametrize(("status", "headers"), [(503, {}), (429, {"Retry-After": "0.1"})])
def test_a_passing_failure_is_sent_again_and_each_try_asks_first(
    status: int, headers: dict[str, str], tmp_path: Path
) -> None:
    asked: list[str] = []
    with scripted_api() as server:
        server.answers = [(status, {"reason": "Busy"}, headers)]
        answer = during(server.url, lambda api: api.create(POD, MANIFEST, {}), tmp_path, before_write=asked.append)
    assert (answer, len(server.sent), asked) == ({"answered": True}, 2, ["create pods", "create pods"])


def test_a_throttled_request_holds_no_other_back(tmp_path: Path) -> None:
    async def use(api: KubeApi) -> list[str]:
        throttled = asyncio.create_task(api.create(POD, MANIFEST, {}))
        assert await asyncio.to_thread(server.asked.wait, SECONDS)
        await api.get(POD, "here", "p")
        so_far = [method for method, *_ in server.sent]
        await throttled
        return so_far

    with scripted_api() as server:
        server.answers = [(429, {"reason": "TooManyRequests"}, {"Retry-After": "3"})]
        assert during(server.url, use, tmp_path) == ["POST", "GET"], "the throttled one is not sent again yet"
        assert [method for method, *_ in server.sent] == ["POST", "GET", "POST"]


def test_a_write_is_abandoned_when_it_is_no_longer_allowed_and_a_read_is_not_asked_about(tmp_path: Path) -> None:
    asked: list[str] = []

    def forbid(what: str) -> None:
        asked.append(what)
        raise LookupError(what)

    async def use(api: KubeApi) -> Any:
        with pytest.raises(LookupError, match="create pods"):
            await api.create(POD, MANIFEST, {})
        return await api.get(POD, "here", "p")

    with scripted_api() as server:
        server.held_method = "POST"
        assert during(server.url, use, tmp_path, write_timeout_seconds=SECONDS, during_write=forbid) == {
            "answered": True
        }
    assert asked == ["create pods"]


def test_open_watches_keep_no_write_waiting_however_many_they_are(tmp_path: Path) -> None:
    count = 130  # more than the hundred connections that the library allows

    async def watch(api: KubeApi) -> None:
        async for _ in api.watch(POD, "here", "", 1, int(SECONDS)):
            pass

    async def use(api: KubeApi) -> Any:
        watches = [asyncio.create_task(watch(api)) for _ in range(count)]
        try:
            return await api.create(POD, MANIFEST, {})
        finally:
            for each in watches:
                each.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    with scripted_api() as server:
        server.held_method = "GET"
        answer = during(server.url, use, tmp_path, write_timeout_seconds=20.0, tries=1)
    assert answer == {"answered": True}


def test_a_write_without_an_answer_says_how_long_it_waited(tmp_path: Path) -> None:
    with scripted_api() as server:
        server.held_method = "POST"
        with pytest.raises(ApiError, match=r"create pods: no answer within 0\.2 s") as raised:
            during(server.url, lambda api: api.create(POD, MANIFEST, {}), tmp_path, write_timeout_seconds=0.2, tries=1)
    assert raised.value.is_passing


def test_a_client_of_one_try_raises_a_passing_failure_at_once(tmp_path: Path) -> None:
    with scripted_api() as server:
        server.answers = [(503, {"reason": "Busy", "message": "come again"}, {})]
        with pytest.raises(ApiError, match="get pods p: 503 Busy come again") as raised:
            during(server.url, lambda api: api.get(POD, "here", "p"), tmp_path, tries=1)
    assert (raised.value.is_passing, len(server.sent)) == (True, 1)


def test_a_refusal_is_not_sent_again_and_its_properties_say_what_it_means(tmp_path: Path) -> None:
    for status, meaning in ((404, "is_not_found"), (409, "is_conflict")):
        with scripted_api() as server:
            server.answers = [(status, {"reason": "No"}, {})]
            with pytest.raises(ApiError) as raised:
                during(server.url, lambda api: api.get(POD, "here", "p"), tmp_path)
        assert getattr(raised.value, meaning), meaning
        assert not raised.value.is_passing
        assert len(server.sent) == 1


def test_a_server_that_does_not_answer_is_a_passing_failure_of_status_0(tmp_path: Path) -> None:
    with scripted_api() as server:
        pass
    with pytest.raises(ApiError, match="get pods p: no answer") as raised:
        during(server.url, lambda api: api.get(POD, "here", "p"), tmp_path, tries=1)
    assert (raised.value.status, raised.value.is_passing) == (0, True)


def test_a_watch_gives_events_after_a_version_and_ends_with_its_time(tmp_path: Path) -> None:
    async def use(api: KubeApi) -> list[tuple[str, str]]:
        version = (await api.list(POD, "here")).version
        server.put(PODS, {"metadata": {"name": "a"}})
        server.put(PODS, {"metadata": {"name": "b"}})
        server.delete(PODS, "a")
        batches = [batch async for batch in api.watch(POD, "here", "", version, 1)]
        return [(event["type"], event["object"]["metadata"]["name"]) for batch in batches for event in batch]

    with fake_kube_api() as server:
        assert during(server.url, use, tmp_path) == [("ADDED", "a"), ("ADDED", "b"), ("DELETED", "a")]


def test_a_watch_from_a_version_that_is_too_old_raises(tmp_path: Path) -> None:
    async def use(api: KubeApi) -> None:
        async for batch in api.watch(POD, "here", "", 1, 5):
            assert not batch, batch

    with fake_kube_api() as server:
        server.expire()
        with pytest.raises(ApiError, match="too old resource version") as raised:
            during(server.url, use, tmp_path)
    assert raised.value.status == 410


@pytest.mark.parametrize(
    ("fault", "status"), [("refuses_watches", 403), ("fails", 500), ("expire", 410), ("fail_watches", 500)]
)
def test_a_watch_that_fails_is_counted_with_its_code_and_no_other_is(fault: str, status: int, tmp_path: Path) -> None:
    counted: list[tuple[str, str, int]] = []

    async def use(api: KubeApi) -> None:
        version = (await api.list(POD, "here")).version
        async for _ in api.watch(POD, "here", "", version, 1):
            pass
        assert counted == [("list", "pods", 200)]
        attribute = getattr(server, fault)
        if callable(attribute):
            attribute()
        else:
            setattr(server, fault, True)
        with pytest.raises(ApiError):
            async for _ in api.watch(POD, "here", "", version, 5):
                pass

    with fake_kube_api() as server:
        during(server.url, use, tmp_path, on_call=lambda *call: counted.append(call))
    assert counted[1:] == [("watch", "pods", status)]


def test_a_watch_without_an_answer_is_counted(tmp_path: Path) -> None:
    counted: list[tuple[str, str, int]] = []

    async def use(api: KubeApi) -> None:
        with pytest.raises(ApiError):
            async for _ in api.watch(POD, "here", "", 1, 1):
                pass

    with scripted_api() as server:
        pass
    during(server.url, use, tmp_path, on_call=lambda *call: counted.append(call))
    assert counted == [("watch", "pods", 0)]


def test_a_watch_that_hangs_is_given_up_soon_after_its_time(tmp_path: Path) -> None:
    async def use(api: KubeApi) -> None:
        async for batch in api.watch(POD, "here", "", 1, 1):
            raise AssertionError(batch)

    with fake_kube_api() as server:
        server.silent.add(PODS)
        with pytest.raises(ApiError, match=r"watch pods: no answer within 1\.2 s") as raised:
            during(server.url, use, tmp_path, read_timeout_seconds=0.2)
    assert raised.value.is_passing
