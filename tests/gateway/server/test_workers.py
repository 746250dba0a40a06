"""A gateway of two workers, as processes: limits that are exact over both, one scrape, workers that are killed."""

import json
import os
import re
import signal
import ssl
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from prometheus_client.parser import text_string_to_metric_families

from processes.gateway_command import COMMAND, gateway_process
from processes.gateway_harness import MODEL, eventually
from processes.scripted_engine import Hold, Say, ScriptedEngine, answer
from stageline_api.engine_http import Admitted

NAMES = ("fast", "rated", "few", "busy", "wide", "other")
SECRETS = {name: f"sk-{name}-0123456789abcdef" for name in NAMES}
KEYS: list[dict[str, Any]] = [
    {"name": "fast", "key": SECRETS["fast"]},
    {"name": "rated", "key": SECRETS["rated"], "requestsPerMinute": 20},
    {"name": "few", "key": SECRETS["few"], "tokensPerMinute": 4},
    {"name": "busy", "key": SECRETS["busy"], "concurrency": 1},
    {"name": "wide", "key": SECRETS["wide"]},
    {"name": "other", "key": SECRETS["other"]},
]
OPEN_LIMIT = 8
BODY: dict[str, Any] = {"model": MODEL, "prompt": "x"}
REQUESTS = "stageline_gateway_requests_total"
IMPATIENT = (
    "from stageline_gateway.workers import supervisor; supervisor.SILENCE_SECONDS = 6; "
    "import stageline_gateway.__main__"
)


def held() -> list[Any]:
    return [Say(Admitted(prompt_tokens=1)), Hold(), *answer("late")[1:]]


@dataclass
class Served:
    """A gateway of two workers."""

    process: subprocess.Popen[str]
    url: str
    admin: httpx.Client
    engine: ScriptedEngine
    directory: Path
    http: httpx.Client
    """Every request of it is a connection of its own, which the kernel gives to one of the workers."""

    def ask(self, name: str) -> int:
        headers = {"authorization": f"Bearer {SECRETS[name]}"}
        return self.http.post("/v1/completions", json=BODY, headers=headers).status_code

    @contextmanager
    def stream(self, name: str) -> Iterator[httpx.Response]:
        headers = {"authorization": f"Bearer {SECRETS[name]}"}
        with self.http.stream("POST", "/v1/completions", json=BODY | {"stream": True}, headers=headers) as streaming:
            yield streaming

    @property
    def log(self) -> str:
        return (self.directory / "gateway.log").read_text()

    @property
    def workers(self) -> list[int]:
        """Process ids."""
        return children(self.process.pid)

    def figure(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels, in one scrape."""
        page = self.admin.get("/metrics")
        assert page.status_code == 200, page.text
        samples = (sample for family in text_string_to_metric_families(page.text) for sample in family.samples)
        return sum(each.value for each in samples if each.name == name and labels.items() <= each.labels.items())


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextmanager
def served_by_two(
    directory: Path,
    engine: ScriptedEngine,
    *options: str,
    program: tuple[str, ...] = (),
    trust: ssl.SSLContext | bool = True,
) -> Iterator[Served]:
    keys = directory / "keys.yaml"
    keys.write_text(json.dumps({"keys": KEYS}))
    limits = ("--keys", str(keys), "--open-limit", str(OPEN_LIMIT), "--log-level", "debug")
    with ExitStack() as stack:
        program = program or tuple(COMMAND)
        started = gateway_process(directory, engine, "--workers", "2", *limits, *options, program=program, trust=trust)
        process, url = stack.enter_context(started)
        admin_url = re.search(r"admin on (http://\S+)", (directory / "gateway.log").read_text())
        assert admin_url
        # A pool that keeps none may close one that another thread has just been given; one that was asked for is gone.
        once = {"connection": "close"}
        unlimited = httpx.Limits(max_connections=None)
        admin, http = (
            stack.enter_context(
                httpx.Client(base_url=base, trust_env=False, timeout=120, limits=unlimited, headers=once, verify=trust)
            )
            for base in (admin_url[1], url)
        )
        eventually(lambda: admin.get("/readyz").status_code == 200, (directory / "gateway.log").read_text)
        yield Served(process, url, admin, engine, directory, http)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    engine = ScriptedEngine()
    engine.start()
    try:
        with served_by_two(tmp_path_factory.mktemp("two"), engine) as served:
            yield served
    finally:
        engine.stop()


@pytest.fixture
def served(shared: Served) -> Iterator[Served]:
    """The module's gateway, with nothing open."""
    shared.engine.script = lambda _: answer("hello")
    shared.engine.hold()
    eventually(lambda: len(shared.workers) == 2, lambda: shared.log)
    yield shared
    shared.engine.release()
    eventually(
        lambda: shared.admin.get("/status").json()["open_requests"] == 0, lambda: shared.admin.get("/status").text
    )


def at_once(count: int, ask: Callable[[], int], clients: int | None = None) -> Counter[int]:
    """How often each status came of as many requests at the same time, or of so many clients."""
    with ThreadPoolExecutor(clients or count) as pool:
        return Counter(asked.result() for asked in [pool.submit(ask) for _ in range(count)])


def test_exactly_as_many_requests_a_minute_pass_as_a_key_may_send(served: Served) -> None:
    began = time.monotonic()
    # No more at once than a key's share of the open requests, which would refuse what its rate allows.
    statuses = at_once(60, lambda: served.ask("rated"), clients=OPEN_LIMIT // 2)
    refilled = (time.monotonic() - began) * 20 / 60
    assert set(statuses) == {200, 429}, statuses
    assert 20 <= statuses[200] <= 20 + refilled, (statuses, refilled)


def test_tokens_that_one_worker_counted_keep_requests_out_of_both(served: Served) -> None:
    served.engine.script = lambda _: answer("hello", prompt_tokens=1000)
    assert served.ask("few") == 200
    assert at_once(12, lambda: served.ask("few")) == {429: 12}


def test_a_key_with_one_place_never_has_two(served: Served) -> None:
    served.engine.script = lambda _: held()
    asked_before = len(served.engine.requests)
    with ThreadPoolExecutor(24) as pool:
        asked = [pool.submit(served.ask, "busy") for _ in range(24)]
        eventually(lambda: sum(one.done() for one in asked) == 23, lambda: f"{[one.done() for one in asked]}")
        assert len(served.engine.requests) - asked_before == 1
        served.engine.release()
        assert Counter(one.result() for one in asked) == {200: 1, 429: 23}
    served.engine.script = lambda _: answer("hello")
    assert [served.ask("busy") for _ in range(4)] == [200] * 4, "the place was not given back"


def test_open_requests_and_the_share_of_a_key_are_those_of_both_workers(served: Served) -> None:
    served.engine.script = lambda _: held()
    with ThreadPoolExecutor(60) as pool:
        wide = [pool.submit(served.ask, "wide") for _ in range(20)]
        eventually(
            lambda: sum(one.done() for one in wide) == 20 - OPEN_LIMIT // 2, lambda: served.admin.get("/status").text
        )
        others = [pool.submit(served.ask, name) for name in ("fast", "other") for _ in range(20)]
        eventually(lambda: sum(one.done() for one in others) == 40 - OPEN_LIMIT // 2, lambda: f"{others}")
        assert served.admin.get("/status").json()["open_requests"] == OPEN_LIMIT
        assert served.figure("stageline_gateway_requests_in_flight") == OPEN_LIMIT
        served.engine.release()
        assert Counter(one.result() for one in wide) == {200: OPEN_LIMIT // 2, 429: 20 - OPEN_LIMIT // 2}
        refused = Counter(one.result() for one in others)
        assert (refused[200], refused[503] + refused[429]) == (OPEN_LIMIT // 2, 40 - OPEN_LIMIT // 2), refused


def test_one_scrape_tells_of_both_workers_whichever_is_asked(served: Served) -> None:
    before, names_before = served.figure(REQUESTS, code="200"), served.log.count("answered with 200")
    for _ in range(30):
        assert served.ask("fast") == 200
    eventually(lambda: served.log.count("answered with 200") == names_before + 30, lambda: served.log)
    lines = [line for line in served.log.splitlines() if "answered with 200" in line]
    assert {found[1] for line in lines if (found := re.search(r'"worker": (\d)', line))} == {"0", "1"}, lines
    assert [served.figure(REQUESTS, code="200") - before for _ in range(6)] == [30] * 6
    assert served.figure("stageline_gateway_groups", ready="true") == 1, "both see the same group"
    assert served.admin.get("/status").json()["workers"] == 2


def test_a_killed_worker_gives_back_what_it_held_and_no_counter_goes_back(served: Served) -> None:
    served.engine.script = lambda _: held()
    with served.stream("busy") as streaming:
        assert streaming.status_code == 200
        # What a worker has counted is kept as of a scrape.
        counted, lost = served.figure(REQUESTS, code="200"), served.figure("stageline_gateway_workers_lost_total")
        before = served.workers
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(httpx.HTTPError):
            streaming.read()
    served.engine.script = lambda _: answer("hello")
    eventually(lambda: answers(served) and not set(before) & set(served.workers), lambda: served.log)
    assert served.ask("busy") == 200, "its place was lost with it"
    eventually(lambda: served.figure("stageline_gateway_workers_lost_total") == lost + 2, lambda: served.log)
    eventually(lambda: served.figure(REQUESTS, code="200") == counted + 1, lambda: served.admin.get("/metrics").text)
    assert served.log.count("was lost: it ended by SIGKILL") >= 2


def answers(served: Served) -> bool:
    try:
        return served.admin.get("/readyz").status_code == 200 and served.http.get("/readyz").status_code == 200
    except httpx.HTTPError:
        return False


def test_changed_keys_reach_both_workers(served: Served) -> None:
    keys = served.directory / "keys.yaml"
    changed = [one | {"key": "sk-new-0123456789abcdef"} if one["name"] == "other" else one for one in KEYS]
    new = served.directory / ".new"
    new.write_text(json.dumps({"keys": changed}))
    new.replace(keys)
    eventually(lambda: {served.ask("other") for _ in range(12)} == {401}, lambda: served.log)


@pytest.mark.thorough
def test_a_worker_that_stands_still_is_replaced(tmp_path: Path, engine: ScriptedEngine) -> None:
    """Nothing hangs for good: connections that it was given end with it."""
    with served_by_two(tmp_path, engine, program=(sys.executable, "-c", IMPATIENT)) as served:
        stopped, _ = served.workers
        os.kill(stopped, signal.SIGSTOP)
        eventually(lambda: stopped not in served.workers, lambda: served.log)
        eventually(lambda: answers(served) and len(served.workers) == 2, lambda: served.log)
        assert "said nothing for 6 s" in served.log
        assert [served.ask("fast") for _ in range(12)] == [200] * 12


@pytest.mark.thorough
def test_requests_need_no_supervisor_and_questions_about_the_whole_do_not_hang_without(
    tmp_path: Path, engine: ScriptedEngine
) -> None:
    engine.script = lambda _: answer("hello")
    with served_by_two(tmp_path, engine) as served:
        served.process.send_signal(signal.SIGSTOP)
        assert [served.ask("fast") for _ in range(12)] == [200] * 12
        refused = served.admin.get("/metrics")
        assert (refused.status_code, "supervisor" in refused.text) == (503, True), refused.text
        served.process.send_signal(signal.SIGCONT)
        eventually(lambda: served.admin.get("/metrics").status_code == 200, lambda: served.log)


def test_workers_finish_their_streams_when_told_to_end(tmp_path: Path, engine: ScriptedEngine) -> None:
    engine.script = lambda _: held()
    with served_by_two(tmp_path, engine, "--drain-seconds", "600") as served, ExitStack() as stack:
        streams = [stack.enter_context(served.stream(name)) for name in ("fast", "wide", "other", "busy")]
        served.process.send_signal(signal.SIGTERM)
        eventually(lambda: not answers(served), "it still takes connections")
        engine.release()
        assert all(one.read().rstrip().endswith(b"[DONE]") for one in streams)
        assert served.process.wait(60) == 0, served.log


def test_workers_end_when_their_supervisor_is_killed(tmp_path: Path, engine: ScriptedEngine) -> None:
    engine.script = lambda _: held()
    with served_by_two(tmp_path, engine, "--drain-seconds", "600") as served, served.stream("fast") as streaming:
        workers = served.workers
        served.process.kill()
        eventually(lambda: not answers(served), "it still takes connections")
        engine.release()
        assert streaming.read().rstrip().endswith(b"[DONE]"), "an answer was not finished"
        eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), lambda: served.log)


def test_connections_by_tls_count_over_both_workers(tmp_path: Path, engine: ScriptedEngine) -> None:
    engine.script = lambda _: held()
    authority = trustme.CA()
    pair, trust = authority.issue_cert("127.0.0.1"), ssl.create_default_context()
    authority.configure_trust(trust)
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    certificate.write_bytes(b"".join(blob.bytes() for blob in pair.cert_chain_pems))
    pair.private_key_pem.write_to_path(str(key))
    options = ("--tls-certificate", str(certificate), "--tls-key", str(key), "--connection-limit", "4")
    with served_by_two(tmp_path, engine, *options, trust=trust) as served, ExitStack() as stack:
        for name in ("fast", "wide", "other", "busy"):
            assert stack.enter_context(served.stream(name)).status_code == 200
        for _ in range(10):
            with pytest.raises(httpx.HTTPError):
                served.ask("fast")
        engine.release()


def test_what_keeps_every_worker_from_starting_is_said_once(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys: []")
    options = ["--workers", "2", "--port", "0", "--endpoints", str(tmp_path / "e.json"), "--keys", str(keys)]
    ended = subprocess.run([*COMMAND, *options], capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 1
    assert ended.stderr.count("The API keys can't be used: keys.yaml: keys") == 1, ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("value", ["0", "65", "-1", "two"])
def test_a_number_of_workers_that_makes_no_sense_is_refused(value: str) -> None:
    ended = subprocess.run([*COMMAND, "--workers", value], capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 2
    assert "--workers" in ended.stderr


@pytest.mark.thorough
def test_workers_do_not_share_a_port_with_somebody_else(tmp_path: Path, engine: ScriptedEngine) -> None:
    with served_by_two(tmp_path, engine) as served:
        port = str(httpx.URL(served.url).port)
        options = ["--workers", "2", "--port", port, "--endpoints", str(tmp_path / "e.json")]
        ended = subprocess.run([*COMMAND, *options], capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 1
    assert f"127.0.0.1:{port}: Address already in use" in ended.stderr
