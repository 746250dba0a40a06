"""Who may come in, how much each may ask for, and that changed keys count without a restart."""

import hashlib
import json
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from processes.cpu_bounds import CpuBound
from processes.gateway_harness import MODEL, RunningGateway, eventually, group, running_gateway
from processes.scripted_engine import Hold, Say, ScriptedEngine, answer
from stageline_api.engine_http import Admitted
from stageline_api.errors import UserError
from stageline_gateway.admission import keys
from stageline_gateway.app import build_app
from stageline_gateway.settings import GatewaySettings

SECRETS = {name: f"sk-{name}-0123456789abcdef" for name in ("free", "slow", "few", "busy", "other")}
BODY: dict[str, Any] = {"model": MODEL, "prompt": "x"}
KEYS: list[dict[str, Any]] = [
    {"name": "free", "key": SECRETS["free"], "priority": -3},
    {"name": "slow", "sha256": hashlib.sha256(SECRETS["slow"].encode()).hexdigest(), "requestsPerMinute": 2},
    {"name": "few", "key": SECRETS["few"], "tokensPerMinute": 4},
    {"name": "busy", "key": SECRETS["busy"], "concurrency": 1},
    {"name": "other", "key": SECRETS["other"], "models": ["another"]},
]


def write_keys(path: Path, keys: list[dict[str, Any]]) -> None:
    """Replace a keys file."""
    replace_whole(path, json.dumps({"keys": keys}))


def replace_whole(path: Path, content: str) -> None:
    """By rename: a file that is only half written is a bad version too, with words of its own."""
    temporary = path.with_name(".new")
    temporary.write_text(content)
    temporary.replace(path)


@pytest.fixture
def keys_path(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    write_keys(path, KEYS)
    return path


@pytest.fixture
def gateway(tmp_path: Path, keys_path: Path, engine: ScriptedEngine) -> Iterator[RunningGateway]:
    """A gateway with keys."""
    settings = GatewaySettings(endpoints_path=tmp_path / "endpoints.json", keys_path=keys_path, retry_after_seconds=1)
    with running_gateway(settings) as gateway:
        gateway.http.headers["authorization"] = f"Bearer {SECRETS['free']}"
        gateway.serve(group(engine.url))
        yield gateway


def ask(gateway: RunningGateway, name: str | None, **extra: Any) -> httpx.Response:
    """A completion as the key of `name`; None sends no key."""
    headers = {"authorization": "" if name is None else f"Bearer {SECRETS[name]}"}
    return gateway.http.post("/v1/completions", json=BODY | extra, headers=headers)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/embeddings"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/v1/models"),
        ("GET", f"/v1/models/{MODEL}"),
    ],
)
def test_nothing_is_done_without_a_key(gateway: RunningGateway, engine: ScriptedEngine, method: str, path: str) -> None:
    headers: list[Any] = ["", "Bearer", "Basic abc", "Bearer sk-unknown", "Bearer " + "x" * 5000, b"Bearer caf\xe9"]
    for header in headers:
        answered = gateway.http.request(method, path, headers={"authorization": header}, content=b"{")
        assert (answered.status_code, answered.json()["error"]["code"]) == (401, "invalid_api_key"), header
        assert answered.headers["www-authenticate"].startswith("Bearer")
    assert (engine.requests, engine.asked) == ([], [])


def test_probes_need_no_key(gateway: RunningGateway) -> None:
    for path in ("/healthz", "/readyz"):
        assert gateway.http.get(path, headers={"authorization": ""}).status_code == 200


def test_a_key_opens_and_carries_its_priority(gateway: RunningGateway, engine: ScriptedEngine) -> None:
    answered = ask(gateway, "free")
    assert answered.status_code == 200
    assert engine.requests[0].priority == -3
    assert not [name for name in answered.headers if name.startswith("x-ratelimit")]
    assert gateway.sample("stageline_gateway_key_tokens_total", key_name="free") == 5


def test_models_of_others_are_out_of_sight(gateway: RunningGateway) -> None:
    refused = ask(gateway, "other")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "model_not_allowed")
    headers = {"authorization": f"Bearer {SECRETS['other']}"}
    assert gateway.http.get("/v1/models", headers=headers).json()["data"] == []
    assert gateway.http.get(f"/v1/models/{MODEL}", headers=headers).status_code == 403
    assert ask(gateway, "other", model="another").status_code == 404


def test_requests_per_minute(gateway: RunningGateway) -> None:
    answered = ask(gateway, "slow")
    assert answered.headers["x-ratelimit-limit-requests"] == "2"
    assert answered.headers["x-ratelimit-remaining-requests"] == "1"
    assert ask(gateway, "slow", stream=True).headers["x-ratelimit-remaining-requests"] == "0"
    refused = ask(gateway, "slow")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert "requestsPerMinute" in refused.json()["error"]["message"]
    assert ask(gateway, "free").status_code == 200, "another key's limit"
    labels = {"key_name": "slow", "reason": "rate_limit_exceeded"}
    assert gateway.sample("stageline_gateway_refusals_total", **labels) == 1


def test_tokenizing_counts_as_a_request(gateway: RunningGateway, engine: ScriptedEngine) -> None:
    engine.replies["POST /v1/detokenize"] = (200, '{"text": "ab"}')
    asked: dict[str, Any] = {"model": MODEL, "tokens": [5]}
    headers = {"authorization": f"Bearer {SECRETS['slow']}"}
    answers = [gateway.http.post("/detokenize", json=asked, headers=headers) for _ in range(3)]
    assert [one.status_code for one in answers] == [200, 200, 429]
    assert 1 <= int(answers[-1].headers["retry-after"]) <= 60
    assert ask(gateway, "slow").status_code == 429
    assert gateway.admin.get("/status").json()["open_requests"] == 0


def test_tokens_per_minute_count_prompt_and_answer(gateway: RunningGateway, engine: ScriptedEngine) -> None:
    engine.script = lambda _: answer("a", "b", "c", prompt_tokens=3)
    first = ask(gateway, "few")
    assert (first.status_code, first.headers["x-ratelimit-remaining-tokens"]) == (200, "0")
    refused = ask(gateway, "few")
    assert (refused.status_code, "tokensPerMinute" in refused.text) == (429, True)
    assert int(refused.headers["retry-after"]) > 15, "6 tokens of 4 a minute: the debt is paid back first"


def test_concurrency(gateway: RunningGateway, engine: ScriptedEngine) -> None:
    engine.script = lambda _: [Say(Admitted(prompt_tokens=1)), Hold(), *answer("late")[1:]]
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, gateway, "busy")
        eventually(lambda: engine.requests, "the first request did not come")
        refused = ask(gateway, "busy")
        assert (refused.status_code, "concurrency" in refused.text) == (429, True)
        engine.release()
        assert first.result().status_code == 200
    assert ask(gateway, "busy").status_code == 200, "the place was not given back"


def test_changed_keys_count_at_once(gateway: RunningGateway, keys_path: Path) -> None:
    ask(gateway, "slow")
    write_keys(keys_path, [KEYS[0] | {"priority": 0}, KEYS[1] | {"requestsPerMinute": 3}])
    eventually(lambda: ask(gateway, "busy").status_code == 401, "a key that was taken out still opens")
    assert ask(gateway, "slow").headers["x-ratelimit-remaining-requests"] == "1", "what was used stays used"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not YAML"),
        ("keys: []", "keys: "),
        ("[1]", "top level"),
        ('keys: [{name: a, key: "sk-secret-too"}]', "keys.0.key: "),
        ('keys: [{name: a}]', "keys.0: "),
        ('keys: [{name: "a b", sha256: "00"}]', "keys.0.name: "),
        ('keys: [{name: a, key: "sk-secret-0123456789"}, {name: a, key: "sk-secret-98765432"}]', "'a' is given to two"),
        ('keys: [{name: a, key: "sk-secret-0123456789"}, {name: b, key: "sk-secret-0123456789"}]', "same as 'a'"),
        ('keys: [{name: a, key: "sk-secret-0123456789", rpm: 4}]', "keys.0.rpm: "),
        ('keys: [{name: a, key: "sk-secret-0123456789", concurrency: 0}]', "keys.0.concurrency: "),
        ('keys: [{name: a, key: "sk-secret-0123456789", models: ["team-*/tiny"]}]', "keys.0.models.0: "),
        ('keys: [{name: a, key: "sk-secret-0123456789", models: [tiny, "*"]}]', "'*' must be a model's name"),
        ('keys: [{name: a, key: "sk-secret-0123456789", models: [""]}]', "or 'namespace/*'"),
    ],
)  # fmt: skip
def test_bad_keys_keep_the_old_ones_and_show(
    gateway: RunningGateway, keys_path: Path, caplog: pytest.LogCaptureFixture, content: str, words: str
) -> None:
    replace_whole(keys_path, content)
    eventually(lambda: gateway.sample("stageline_gateway_keys_stale") == 1, "not shown")
    assert ask(gateway, "free").status_code == 200
    assert words in caplog.text
    assert "secret" not in caplog.text
    assert any(words in problem for problem in gateway.admin.get("/status").json()["problems"])
    with pytest.raises(UserError) as refused:
        build_app(GatewaySettings(endpoints_path=Path("e"), keys_path=keys_path))
    assert "secret" not in refused.value.message
    write_keys(keys_path, KEYS)
    eventually(lambda: gateway.sample("stageline_gateway_keys_stale") == 0, "the good version is not taken")


def test_keys_that_vanish_stay_in_force(gateway: RunningGateway, keys_path: Path) -> None:
    keys_path.unlink()
    eventually(lambda: gateway.sample("stageline_gateway_keys_stale") == 1, "not shown")
    assert (ask(gateway, "free").status_code, ask(gateway, None).status_code) == (200, 401)


def test_a_mounted_secret_is_read_and_followed(tmp_path: Path, engine: ScriptedEngine) -> None:
    """As the kubelet lays it out: links into a directory whose name is exchanged."""
    mounted = tmp_path / "mounted"

    def version(name: str, keys: list[dict[str, Any]]) -> None:
        (mounted / name).mkdir(parents=True)
        (mounted / name / "team.yaml").write_text(json.dumps({"keys": keys}))
        link = mounted / "..new"
        link.symlink_to(name)
        os.replace(link, mounted / "..data")  # noqa: PTH105 - Path.replace follows no link either; this says it

    version("..v1", KEYS[:1])
    (mounted / "team.yaml").symlink_to("..data/team.yaml")
    settings = GatewaySettings(endpoints_path=tmp_path / "endpoints.json", keys_path=mounted)
    with running_gateway(settings) as gateway:
        gateway.http.headers["authorization"] = f"Bearer {SECRETS['free']}"
        gateway.serve(group(engine.url))
        version("..v2", KEYS[1:])
        eventually(lambda: ask(gateway, "busy").status_code == 200, "the new version is not read")
        assert ask(gateway, "free").status_code == 401


def test_the_queue_of_a_model_is_bounded(tmp_path: Path, engine: ScriptedEngine, other_engine: ScriptedEngine) -> None:
    engine.script = other_engine.script = lambda _: [Say(Admitted(prompt_tokens=1)), Hold(), *answer("late")[1:]]
    other_engine.served_name = "another"
    settings = GatewaySettings(endpoints_path=tmp_path / "e.json", queue_limit=2, open_limit=3, retry_after_seconds=7)
    with running_gateway(settings) as gateway, ThreadPoolExecutor(3) as pool:
        gateway.serve(group(engine.url), group(other_engine.url, model="another"))
        waiting = [pool.submit(ask, gateway, None) for _ in range(2)]
        eventually(lambda: len(engine.requests) == 2, "two did not come through")
        assert gateway.sample("stageline_gateway_requests_queued", model_name=MODEL) == 2
        refused = ask(gateway, None)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
        assert refused.headers["retry-after"] == "7"
        other = pool.submit(ask, gateway, None, model="another")
        eventually(lambda: other_engine.requests, "another model has a queue of its own")
        assert ask(gateway, None, model="another").json()["error"]["code"] == "overloaded"
        engine.release()
        other_engine.release()
        assert [one.result().status_code for one in (*waiting, other)] == [200] * 3
        assert gateway.sample("stageline_gateway_requests_queued", model_name=MODEL) == 0
        assert ask(gateway, None).status_code == 200


def test_a_draining_gateway_takes_nothing_more(gateway: RunningGateway) -> None:
    gateway.drain()
    refused = ask(gateway, "free")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert gateway.http.get("/readyz").status_code == gateway.admin.get("/readyz").status_code == 503
    assert gateway.admin.get("/accepting").status_code == 503


@pytest.mark.parametrize("path", ["/metrics", "/status", "/drain"])
def test_admin_endpoints_are_not_on_the_public_port(gateway: RunningGateway, path: str) -> None:
    assert gateway.http.get(path).status_code == 404
    assert gateway.http.post(path).status_code == 404


HELD = [Say(Admitted(prompt_tokens=1)), Hold(), *answer("late")[1:]]


def test_each_choice_takes_a_place_of_its_key(tmp_path: Path, engine: ScriptedEngine) -> None:
    keys_path = tmp_path / "keys.yaml"
    write_keys(keys_path, [{"name": "few", "key": SECRETS["few"], "concurrency": 4, "requestsPerMinute": 5}])
    engine.script = lambda _: list(HELD)
    settings = GatewaySettings(endpoints_path=tmp_path / "endpoints.json", keys_path=keys_path)
    with running_gateway(settings) as gateway, ThreadPoolExecutor(1) as pool:
        gateway.http.headers["authorization"] = f"Bearer {SECRETS['few']}"
        gateway.serve(group(engine.url))
        refused = ask(gateway, "few", n=5)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
        assert "concurrency has 4" in refused.json()["error"]["message"]
        assert engine.requests == []
        first = pool.submit(ask, gateway, "few", n=3)
        eventually(lambda: len(engine.requests) == 3, lambda: f"{len(engine.requests)} of 3 choices came")
        assert gateway.admin.get("/status").json()["open_requests"] == 3
        refused = ask(gateway, "few", n=2)
        assert (refused.status_code, "concurrency" in refused.text) == (429, True)
        engine.release()
        assert len(first.result().json()["choices"]) == 3
        whole = ask(gateway, "few", n=4)
        assert whole.status_code == 200, "not all places were given back"
        assert whole.headers["x-ratelimit-remaining-requests"] == "1", "four of five were asked"


@pytest.mark.parametrize(
    ("bounds", "code"), [((4, 9), "queue_full"), ((9, 4), "overloaded")], ids=["waiting", "open at all"]
)
def test_each_choice_takes_a_place_of_the_gateway(
    tmp_path: Path, engine: ScriptedEngine, bounds: tuple[int, int], code: str
) -> None:
    engine.script = lambda _: list(HELD)
    settings = GatewaySettings(tmp_path / "e.json", queue_limit=bounds[0], open_limit=bounds[1])
    with running_gateway(settings) as gateway, ThreadPoolExecutor(2) as pool:
        gateway.serve(group(engine.url))
        refused = ask(gateway, None, n=5)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n"), refused.text
        waiting = [pool.submit(ask, gateway, None, n=3)]
        eventually(lambda: len(engine.requests) == 3, lambda: f"{len(engine.requests)} of 3 choices came")
        refused = ask(gateway, None, n=2)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, code)
        assert "retry-after" in refused.headers
        waiting.append(pool.submit(ask, gateway, None))
        eventually(lambda: len(engine.requests) == 4, "the last place is free")
        assert ask(gateway, None).json()["error"]["code"] == code
        engine.release()
        assert [one.result().status_code for one in waiting] == [200, 200]
        eventually(lambda: gateway.admin.get("/status").json()["open_requests"] == 0, "places are still taken")


def test_a_choice_that_has_ended_leaves_its_place_to_others(tmp_path: Path, engine: ScriptedEngine) -> None:
    keys_path = tmp_path / "keys.yaml"
    write_keys(keys_path, [{"name": "few", "key": SECRETS["few"], "concurrency": 3}])
    engine.script = lambda request: list(HELD) if request.sampling.choice == 2 else answer("early")
    settings = GatewaySettings(tmp_path / "e.json", keys_path=keys_path, open_limit=3)
    with running_gateway(settings) as gateway, ThreadPoolExecutor(1) as pool:
        gateway.http.headers["authorization"] = f"Bearer {SECRETS['few']}"
        gateway.serve(group(engine.url))

        def open_requests() -> int:
            return int(gateway.admin.get("/status").json()["open_requests"])

        asked = pool.submit(ask, gateway, "few", n=3)
        eventually(lambda: len(engine.requests) == 3 and open_requests() == 1, lambda: f"{open_requests()} still open")
        assert ask(gateway, "few", n=2).status_code == 200, "two of three have ended"
        refused = ask(gateway, "few", n=3)
        assert (refused.status_code, "concurrency" in refused.text) == (429, True)
        assert not asked.done()
        engine.release()
        assert len(asked.result().json()["choices"]) == 3
        assert ask(gateway, "few", n=3).status_code == 200, "a place was not given back"
        assert open_requests() == 0


def test_a_choice_leaves_the_queue_with_its_own_first_token(tmp_path: Path, engine: ScriptedEngine) -> None:
    first = answer("early")
    engine.script = lambda request: list(HELD) if request.sampling.choice else [*first[:-1], Hold(), first[-1]]
    with running_gateway(GatewaySettings(tmp_path / "e.json")) as gateway, ThreadPoolExecutor(1) as pool:
        gateway.serve(group(engine.url))
        asked = pool.submit(ask, gateway, None, n=3)

        def queued() -> float:
            return gateway.sample("stageline_gateway_requests_queued", model_name=MODEL)

        eventually(lambda: len(engine.requests) == 3 and queued() == 2, queued)
        assert gateway.admin.get("/status").json()["open_requests"] == 3
        engine.release()
        assert asked.result().status_code == 200
        assert queued() == 0


BAD_BODIES = [b"{", b"[]", b'{"model": 1}', b'{"model": "absent", "prompt": "x"}']


def raw_post(gateway: RunningGateway, name: str, content: bytes) -> httpx.Response:
    headers = {"authorization": f"Bearer {SECRETS[name]}", "content-type": "application/json"}
    return gateway.http.post("/v1/completions", content=content, headers=headers)


def test_what_is_refused_counts_as_a_request_too(gateway: RunningGateway, cpu_bound: CpuBound) -> None:
    """A key that may ask twice a minute can't have fifty bodies read and checked."""
    before = gateway.loop_seconds()
    statuses = [raw_post(gateway, "slow", BAD_BODIES[index % 4]).status_code for index in range(50)]
    spent = gateway.loop_seconds() - before
    assert set(statuses[:2]) <= {400, 404}, statuses
    assert statuses[2:] == [429] * 48, statuses
    assert cpu_bound.holds(spent, 1.0), f"{spent:.3f} s of the loop"
    held = gateway.admin.get("/status").json()["bodies"]
    assert held["bytes"] == 0
    assert held["most_bytes"] < 16 * 1024, held


def test_a_request_that_generates_pays_once(gateway: RunningGateway) -> None:
    assert [ask(gateway, "slow").status_code for _ in range(3)] == [200, 200, 429]


def test_questions_are_metered_apart_from_requests(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = {"authorization": f"Bearer {SECRETS['slow']}"}
    monkeypatch.setattr(keys, "QUESTIONS_PER_MINUTE", 5)
    statuses = [gateway.http.get("/v1/models", headers=headers).status_code for _ in range(7)]
    assert statuses == [200] * 5 + [429] * 2, statuses
    assert ask(gateway, "slow").status_code == 200


def test_bodies_on_their_way_fill_a_keys_places_and_nobody_elses(
    tmp_path: Path, keys_path: Path, engine: ScriptedEngine
) -> None:
    """A key of one place that opens many requests and sends none of them whole."""
    settings = GatewaySettings(tmp_path / "endpoints.json", keys_path=keys_path, open_limit=8, body_timeout_seconds=600)
    with running_gateway(settings) as gateway, ExitStack() as stack:
        gateway.http.headers["authorization"] = f"Bearer {SECRETS['free']}"
        gateway.serve(group(engine.url))
        for name, fitting in (("busy", 1), ("slow", 2), ("few", 4)):
            told = [begun_post(gateway, stack, name) for _ in range(10)]
            eventually(partial(were_refused, told, 10 - fitting), f"{name}: not {10 - fitting} of 10 were refused")
        assert ask(gateway, "free").status_code == 200


def begun_post(gateway: RunningGateway, stack: ExitStack, name: str) -> socket.socket:
    """A connection on which a request's headers and the first byte of its body were sent."""
    url = httpx.URL(gateway.url)
    raw = stack.enter_context(socket.create_connection((url.host, url.port or 0), timeout=60))
    head = "POST /v1/completions HTTP/1.1", "host: x", f"authorization: Bearer {SECRETS[name]}"
    raw.sendall("\r\n".join((*head, "content-type: application/json", "content-length: 100", "", "{")).encode())
    raw.setblocking(False)
    return raw


def were_refused(connections: list[socket.socket], count: int) -> bool:
    return sum(map(was_refused, connections)) == count


def was_refused(raw: socket.socket) -> bool:
    try:
        return b" 429 " in raw.recv(4096, socket.MSG_PEEK)
    except BlockingIOError:
        return False


def test_a_key_holds_no_more_than_its_share_of_the_bodies(
    tmp_path: Path, keys_path: Path, engine: ScriptedEngine
) -> None:
    engine.script = lambda _: [Say(Admitted(prompt_tokens=1)), Hold(), *answer("late")[1:]]
    settings = GatewaySettings(
        tmp_path / "endpoints.json", keys_path=keys_path, body_room_bytes=1_000_000, body_limit_bytes=400_000
    )
    large = json.dumps(BODY | {"prompt": "x" * 300_000}).encode()
    with running_gateway(settings) as gateway, ThreadPoolExecutor(3) as pool:
        gateway.http.headers["authorization"] = f"Bearer {SECRETS['free']}"
        gateway.serve(group(engine.url))
        first = pool.submit(raw_post, gateway, "free", large)
        eventually(lambda: len(engine.requests) == 1, "the first is under way")
        body_bytes = "stageline_gateway_body_bytes"
        eventually(lambda: gateway.sample(body_bytes) < 400_000, "it was sent")
        refused = raw_post(gateway, "free", large)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "body_share")
        second = pool.submit(raw_post, gateway, "busy", large)
        eventually(lambda: len(engine.requests) == 2, "another key's has room")
        engine.release()
        assert [first.result().status_code, second.result().status_code] == [200, 200]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"x-forwarded-for": "127.0.0.1"},
        {"forwarded": "for=127.0.0.1"},
        {"authorization": f"Bearer {SECRETS['free']}"},
    ],
    ids=["nothing", "forwarded", "forwarded by the standard", "a client's key"],
)
def test_nobody_drains_a_gateway_by_its_admin_port(gateway: RunningGateway, headers: dict[str, str]) -> None:
    """A sidecar makes everybody's address this machine's, so no address may open it."""
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        for path in ("/drain", "/status", "/metrics", "/accepting"):
            refused = gateway.admin.request(method, path, headers=headers)
            assert refused.status_code in (404, 405), (method, path, refused.text)
    assert gateway.admin.get("/status").json()["draining"] is False


def test_the_admin_port_answers_nothing_to_web_pages(gateway: RunningGateway) -> None:
    for headers in ({"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}):
        refused = gateway.admin.get("/status", headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "web_page")
