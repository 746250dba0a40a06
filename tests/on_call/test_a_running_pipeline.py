"""The three commands over one real `stageline up` of two stages, told by the machine and by an API server alike.

The tests share it and run in the order of the file: it serves, then a stage is killed, then it is back, then it ends.
"""

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import yaml

from oracles.on_call_checks import (
    DEADLINE_SECONDS,
    NAMESPACE,
    PLANTED_HEADER,
    archive_of,
    as_cluster,
    planted_in,
    stage_pid,
    wait_for,
    write_manifest,
    written,
)
from processes.pseudo_terminal import on_terminal
from processes.serving_command import ServingCommand, kill, serving
from stageline_api import ports
from stageline_cli.main import run
from stageline_cli.on_call.bundle import bundle
from stageline_cli.on_call.facts import scrape
from stageline_cli.on_call.sources.choose_source import open_source
from stageline_cli.on_call.views.watch import Watch
from stageline_runtime.trace import collect

BACKOFF_SECONDS = 20
"""Long enough to see that a group has failed; its supervisor is stopped while that is looked into."""

Run = Callable[..., tuple[int, str, str]]
T = TypeVar("T")
TIMES = r"TTFT p50 \S+ m?s p95 \S+ m?s"


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingCommand]:
    directory = tmp_path_factory.mktemp("on-call")
    file = write_manifest(directory, BACKOFF_SECONDS)
    with serving(file, directory, directory / "cache", "--plain") as command:
        command.wait_serving()
        yield command


@pytest.fixture(autouse=True)
def patience_for_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod that takes some seconds to answer is not one that can't be read."""
    for module in (scrape, bundle, collect):
        monkeypatch.setattr(module, "TIMEOUT_SECONDS", DEADLINE_SECONDS)


@pytest.fixture
def stageline(up: ServingCommand, capsys: pytest.CaptureFixture[str]) -> Run:
    """A command about this `up`: its exit status, output and errors."""

    def _run(*arguments: str, where: tuple[str, ...] = ("--state-dir", str(up.state_dir))) -> tuple[int, str, str]:
        capsys.readouterr()
        status = run([*arguments, *where])
        written = capsys.readouterr()
        return status, written.out, written.err

    return _run


@pytest.fixture
def traffic(up: ServingCommand) -> Iterator[None]:
    """A client that asks one question after the other, with a breath between, and has had an answer."""
    stop, answered = threading.Event(), threading.Event()

    def _ask() -> None:
        body = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 64, "ignore_eos": True}
        with httpx.Client(trust_env=False, timeout=120) as client:
            while not stop.is_set():
                if client.post(f"{up.url}/v1/completions", json=body).is_success:
                    answered.set()
                stop.wait(0.1)

    asking = threading.Thread(target=_ask, daemon=True)
    asking.start()
    assert answered.wait(120), up.output()
    yield
    stop.set()
    asking.join(120)


def facts(text: str) -> dict[str, Any]:
    return dict(json.loads(text)["models"][0])


def look_until(look: Callable[[], T], holds: Callable[[T], bool]) -> T:
    """Look again until it holds: how much happens between the two readings of a look is the machine's affair."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not holds(seen := look()):
        assert time.monotonic() < deadline, seen
    return seen


def is_answering(model: dict[str, Any]) -> bool:
    """Whether steps were run and answers given between the two readings."""
    group, traffic = model["groups"][0], model["traffic"]
    at_work = all(stage["activity"] and stage["activity"]["busy_share"] > 0 for stage in group["stages"])
    return bool(at_work and group["engine"]["tokens_per_second"] and traffic and traffic["tokens_per_second"])


@pytest.mark.usefixtures("traffic")
def test_the_fleet_is_one_line_for_each_model(stageline: Run) -> None:
    status, output, errors = stageline("status", "--exit-code")
    assert (status, errors) == (0, "")
    place, heading, row = output.splitlines()[:3]
    assert place.strip() == "stageline up on this machine"
    assert heading.split()[:5] == ["model", "health", "ready", "groups", "revision"]
    assert row.split()[:5] == ["tiny", "Healthy", "1/1", "1", "Ready"]
    assert "not known" not in output


@pytest.mark.usefixtures("traffic")
def test_a_model_s_facts_are_those_of_its_stages(stageline: Run) -> None:
    def _look() -> dict[str, Any]:
        status, output, _ = stageline("status", "tiny", "-o", "json")
        assert status == 0
        return facts(output)

    model = look_until(_look, is_answering)
    assert (model["health"], model["ready_groups"], model["wanted_groups"]) == ("Healthy", 1, 1)
    group = model["groups"][0]
    assert (group["phase"], group["incarnation"], group["waits_for"]) == ("Ready", 1, "")
    assert (group["restarts_in_window"], group["max_restarts"]) == (0, 5)
    assert [stage["layers"] for stage in group["stages"]] == ["0-1", "2-3"]
    for stage in group["stages"]:
        did = stage["activity"]
        assert did["busy_share"] + did["wait_share"] + did["idle_share"] == pytest.approx(1, abs=0.01), did
        assert did["busy_share"] > 0, did
        assert stage["memory_bytes"] > 0
        assert 0 < stage["kv_tokens"] <= stage["kv_capacity_tokens"]
    pipeline = group["pipeline"]
    assert 0 < pipeline["bubble"] < 1
    assert pipeline["bottleneck_share"] == max(stage["activity"]["busy_share"] for stage in group["stages"])
    assert 1 <= pipeline["imbalance"] <= 2
    assert group["engine"]["tokens_per_second"] > 0
    assert model["traffic"]["tokens_per_second"] > 0
    assert model["traffic"]["error_ratio"] in (0, None)


def test_yaml_says_what_json_says(stageline: Run) -> None:
    _, as_json, _ = stageline("status", "tiny", "-o", "json", "--window-seconds", "0")
    _, as_yaml, _ = stageline("status", "tiny", "-o", "yaml", "--window-seconds", "0")
    one, other = json.loads(as_json), yaml.safe_load(as_yaml)
    assert (
        one["models"][0]["groups"][0]["stages"][0]["layers"] == other["models"][0]["groups"][0]["stages"][0]["layers"]
    )
    assert one.keys() == other.keys()
    assert one["models"][0]["groups"][0]["pipeline"] is None, "one reading has no shares"


@pytest.mark.usefixtures("traffic")
def test_a_cluster_s_api_server_tells_the_same(stageline: Run, up: ServingCommand, tmp_path: Path) -> None:
    _, here, _ = stageline("status", "tiny", "-o", "json")
    with as_cluster(up, tmp_path) as (api, where):

        def _look() -> str:
            status, there, errors = stageline("status", "tiny", "-o", "json", where=where)
            assert (status, errors) == (0, "")
            return there

        there = look_until(_look, lambda there: is_answering(facts(there)))
    assert json.loads(there)["where"] == f"cluster lab, namespace {NAMESPACE}"
    ours, theirs = facts(here)["groups"][0], facts(there)["groups"][0]
    for field in ("group", "incarnation", "revision", "phase", "max_restarts"):
        assert ours[field] == theirs[field]
    for our, their in zip(ours["stages"], theirs["stages"], strict=True):
        assert (our["pod"], our["layers"], our["memory_bytes"]) == (
            their["pod"],
            their["layers"],
            their["memory_bytes"],
        )
        assert their["activity"]["busy_share"] > 0
    assert theirs["engine"]["tokens_per_second"] > 0
    assert facts(there)["traffic"]["tokens_per_second"] > 0
    assert any(f":{ports.STAGE_HEALTH}/proxy/metrics" in path for path in api.paths), api.paths
    assert not [path for path in api.paths if "secret" in path]


def test_what_the_api_server_refuses_is_said_and_the_rest_shown(
    stageline: Run, up: ServingCommand, tmp_path: Path
) -> None:
    with as_cluster(up, tmp_path) as (api, where):
        api.refused += [f"/api/v1/namespaces/{NAMESPACE}/pods/tiny-0-1-1:"]
        status, output, _ = stageline("status", "tiny", where=where)
        assert status == 0
        assert "tiny, cluster lab" in output
        assert "stage of pod default/tiny-0-1-1 can't be read: through the API server: status 403" in output
        api.refused += ["/apis/stageline.dev"]
        status, output, errors = stageline("status", where=where)
        assert (status, output) == (1, "")
        assert "PipelineModels can't be read: status 403: " in errors
        assert "Traceback" not in errors


@pytest.mark.usefixtures("traffic")
def test_a_frame_of_top_as_plain_text(stageline: Run) -> None:
    def _look() -> str:
        status, output, errors = stageline("top", "--once", "--interval", "0.5")
        assert (status, errors) == (0, "")
        return output

    output = look_until(_look, lambda output: bool(re.search(TIMES, output) and "bottleneck" in output))
    assert re.search(r"  0 +[█▒·]{40}  \d+ % +\d+ % +\d+ % +\d+ % +0-1 +Ready", output), output
    assert re.search(r"bottleneck stage [01] \(\d+ % busy\), imbalance [12]\.\d\d", output), output


@pytest.mark.usefixtures("traffic")
def test_a_bundle_of_a_healthy_model_has_metrics_and_a_trace(stageline: Run, tmp_path: Path) -> None:
    status, output, errors = stageline(
        "debug-bundle", "--trace-seconds", "0.5", "--output", str(tmp_path / "bundle.tar.gz")
    )
    assert (status, errors) == (0, "")
    assert "begin with stageline-tiny-" in output
    files = archive_of(tmp_path)
    assert "stageline_stage_busy_seconds_total" in files["metrics/tiny-0-1-1.stage.prom"]
    assert "stageline_engine_generation_tokens_total" in files["metrics/tiny-0-1-0.engine.prom"]
    assert "stageline_gateway_requests_total" in files["metrics/gateway.prom"]
    assert len(json.loads(files["traces/group-0.json"])["traceEvents"]) > 10
    assert "Nothing." in files["README.md"]
    assert planted_in(files) == []


@pytest.mark.parametrize(("ending", "columns"), [("q", 80), ("\x03", 160)])
def test_top_on_a_terminal_ends_by_a_key_and_leaves_it_as_it_was(up: ServingCommand, ending: str, columns: int) -> None:
    command = [sys.executable, "-m", "stageline_cli.main", "top", "--interval", "0.3", "--state-dir", str(up.state_dir)]
    with on_terminal(command, columns=columns) as terminal:
        terminal.read_until("2-3", times=2)
        assert terminal.modes != terminal.modes_before, "keys come without Enter"
        terminal.type(ending)
        assert terminal.wait() == 0, terminal.shown
        assert terminal.modes == terminal.modes_before


def test_an_api_server_that_goes_away_while_watched_leaves_what_was_seen_last(
    up: ServingCommand, tmp_path: Path
) -> None:
    with as_cluster(up, tmp_path) as (api, where), open_source(**source_of(Path(where[1]))) as source:
        watch = Watch(source, "tiny")
        assert watch.look().problems == ()
        api.refused += ["/apis/stageline.dev"]
        seen = watch.look()
        assert seen.models[0].groups[0].phase == "Ready"
        assert seen.models[0].groups[0].stages[0].activity is not None, "pods are still asked"
        assert "shown as last seen: cluster lab, namespace default: PipelineModels can't be read" in seen.problems[0]


def source_of(kubeconfig: Path) -> dict[str, Any]:
    """The options that lead to a cluster."""
    nothing = dict.fromkeys(("state_dir", "context", "namespace", "reach"))
    return nothing | {"local": False, "cluster": True, "all_namespaces": False, "kubeconfig": kubeconfig}


def test_a_bundle_from_a_cluster_reads_no_secret_and_says_what_it_could_not_have(
    stageline: Run, up: ServingCommand, tmp_path: Path
) -> None:
    with as_cluster(up, tmp_path) as (api, where):
        api.refused += ["/api/v1/pods", f"/api/v1/namespaces/{NAMESPACE}/services"]
        output = str(tmp_path / "bundle.tar.gz")
        status, _, errors = stageline("debug-bundle", "tiny", "--trace-seconds", "0", "--output", output, where=where)
    assert status == 0
    files = archive_of(tmp_path)
    assert "[redacted]" in files["logs/tiny-0-1-0/stage.log"]
    assert "v1.99.0" in files["versions/kubernetes.yaml"]
    assert "stageline_stage_busy_seconds_total" in files["metrics/tiny-0-1-0.stage.prom"]
    assert len(json.loads(files["traces/group-0.json"])["traceEvents"]) > 10, "the timeline came through the proxy"
    assert "GroupReady" in files["events.yaml"]
    for missing in ("components", "objects/service"):
        assert f"- `{missing}`: status 403" in files["README.md"] or f"- `{missing}`: pods of" in files["README.md"]
        assert f"missing {missing}" in errors
    assert planted_in(files) == []
    assert not [path for path in api.paths if "secrets" in path], api.paths


def test_a_killed_stage_is_seen_by_every_command_and_the_group_comes_back(
    stageline: Run, up: ServingCommand, tmp_path: Path
) -> None:
    log = up.state_dir / "tiny" / "logs" / "tiny-0-1-0" / "stage.log"
    with log.open("a") as file:
        file.write(f"GET /v1 Authorization: Bearer {PLANTED_HEADER}\n")
    command = [sys.executable, "-m", "stageline_cli.main", "top", "--interval", "0.3", "--state-dir", str(up.state_dir)]
    seen = tmp_path / "top.txt"
    with seen.open("wb") as file_of_top, subprocess.Popen(command, stdout=file_of_top, stderr=file_of_top) as top:
        try:
            wait_for(seen, "Ready for")
            kill(stage_pid(up, 1))
            wait_for(seen, "group 0: BackingOff")
            with supervisor_standing_still(up):
                look_into_the_failure(stageline, tmp_path)
            wait_for(seen, "incarnation 2")
            wait_for(seen, "group 0: Ready", after=written(seen).rindex("incarnation 2"))
            told = len(written(seen))
            wait_for(seen, "·" * 40, after=told)
            wait_for(seen, "100 %", after=told)
            top.send_signal(signal.SIGINT)
            assert top.wait(timeout=120) == 0, written(seen)[-2000:]
        finally:
            top.kill()
    assert "Traceback" not in written(seen)
    _, output, _ = stageline("status", "tiny", "-o", "json", "--window-seconds", "0")
    assert facts(output)["groups"][0]["restarts_in_window"] == 1


@contextmanager
def supervisor_standing_still(up: ServingCommand) -> Iterator[None]:
    """The group stays as it is, however long it takes to look at it."""
    up.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        up.process.send_signal(signal.SIGCONT)


def look_into_the_failure(stageline: Run, directory: Path) -> None:
    """Status and bundle of the group while it is down."""
    status, output, _ = stageline("status", "tiny", "--exit-code", "--window-seconds", "0")
    assert status == 4, output
    assert re.search(r"waits for its next start (in \d+ s|now) \(after Killed of stage 1\)", output), output
    assert "group 0 incarnation 1 stage 1 stage: Killed, exit status 137" in output
    archive = str(directory / "bundle.tar.gz")
    status, _, errors = stageline("debug-bundle", "tiny", "--group", "0", "--output", archive)
    assert status == 0, errors
    files = archive_of(directory)
    assert yaml.safe_load(files["last-words/failures.yaml"])[0]["failureClass"] == "Killed"
    assert yaml.safe_load(files["last-words/tiny-0-1-1.stage.yaml"])["exitCode"] == 137
    assert "ended-pods/tiny-0-1-0.yaml" in files
    assert "[redacted]" in files["logs/tiny-0-1-0/stage.log"]
    assert "GroupFailed" in files["events.yaml"]
    assert "and has no running engine" in files["README.md"]
    assert planted_in(files) == []


def test_a_group_that_is_not_there_is_refused(stageline: Run, tmp_path: Path) -> None:
    status, _, errors = stageline("debug-bundle", "--group", "7", "--output", str(tmp_path / "x.tar.gz"))
    assert status == 2
    assert "tiny has no group 7; it has 0" in errors
    assert not list(tmp_path.iterdir())


def test_what_has_ended_can_still_be_looked_into(stageline: Run, up: ServingCommand, tmp_path: Path) -> None:
    assert up.end() == 0
    status, output, _ = stageline("status", "--exit-code")
    assert status == 4
    assert "there is no PipelineModel" in output
    status, output, _ = stageline("status", "tiny", "--exit-code")
    assert status == 4
    assert "tiny, stageline up on this machine: Ended" in output
    status, _, errors = stageline("debug-bundle", "tiny", "--output", str(tmp_path / "bundle.tar.gz"))
    assert status == 0, errors
    files = archive_of(tmp_path)
    assert "loaded layers" in files["logs/tiny-0-2-1/stage.log"]
    assert planted_in(files) == []
