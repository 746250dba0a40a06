"""`stageline up --monitor --detach` on a tiny model: what Prometheus scrapes, what the page draws, and how it ends."""

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from boards.browser import HOW_TO_GET, Browser, browser, is_installed
from oracles.tiny_models import write_tiny_llama
from processes.free_ports import free_port
from processes.serving_command import command_line, descendants, kill, run_stageline, wait_gone
from stageline_dashboards import shipped
from stageline_local.session.instance import read_record

pytestmark = [
    pytest.mark.skipif(
        shutil.which("prometheus") is None,
        reason="needs Prometheus: apt-get install prometheus (scripts/install-prometheus)",
    ),
    pytest.mark.timeout(900),
]
OPEN_ROWS = "document.querySelectorAll('.row button[aria-expanded=false]').forEach((each) => each.click())"
PANEL_STATES = (
    "return [...document.querySelectorAll('.panel')].map(p => [p.dataset.title, p.dataset.state, p.innerText])"
)

CUT = """
return [...document.querySelectorAll("h1, #boards a, .panel h3, .stat .name, .stat .value, .panel .scroll")]
  .filter((each) => each.scrollWidth > each.clientWidth + 1)
  .map((each) => [each.closest(".panel")?.dataset.title, each.className || each.tagName, each.textContent.slice(0, 60)])
"""
"""What is wider than its place."""


@dataclass(frozen=True)
class Monitored:
    """A model that is up, in the background."""

    state_dir: Path
    port: int
    monitor_port: int

    @property
    def boards(self) -> str:
        return f"http://127.0.0.1:{self.monitor_port}"

    @property
    def pid(self) -> int:
        record = read_record(self.state_dir / "tiny")
        assert record is not None, self.output()
        return record.pid

    def output(self) -> str:
        return (self.state_dir / "tiny" / "up.log").read_text(errors="replace")

    def processes(self, word: str) -> list[int]:
        return [pid for pid in descendants(self.pid) if word in Path((command_line(pid) or [""])[0]).name]

    def ask(self, path: str, **parameters: str) -> Any:
        """Prometheus' answer, through the page's server."""
        answer = httpx.get(f"{self.boards}/prometheus/api/v1/{path}", params=parameters, trust_env=False, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def until(self, condition: Callable[[], Any], what: str, seconds: float = 180.0) -> Any:
        """What `condition` says once it holds: asked again, it might say something else."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            log = (self.state_dir / "tiny" / "logs" / "prometheus.log").read_text(errors="replace")
            assert time.monotonic() < deadline, f"{what}: {found}\n{self.output()}\n{log[-4000:]}"
            time.sleep(0.1)
        return found

    def targets(self) -> dict[tuple[str, str], str]:
        """Health by (job, pod)."""
        active = self.ask("targets", state="active")["activeTargets"]
        return {(each["labels"]["job"], each["labels"]["pod"]): each["health"] for each in active}


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitored]:
    directory = tmp_path_factory.mktemp("monitored")
    model = write_tiny_llama(directory / "model", num_layers=4)
    spec = {"model": {"source": f"file://{model}"}, "parallelism": {"pipeline": 2}, "restart": {"backoffSeconds": 1}}
    document = {
        "apiVersion": "stageline.dev/v1alpha1",
        "kind": "PipelineModel",
        "metadata": {"name": "tiny"},
        "spec": spec,
    }
    (directory / "tiny.yaml").write_text(yaml.safe_dump(document))
    # Beside the gateway's port are its metrics, beside the boards' is Prometheus.
    monitored = Monitored(directory / "state", free_port(in_a_row=2), free_port(in_a_row=2))
    started = run_stageline(
        *("up", str(directory / "tiny.yaml"), "--detach", "--monitor", "--port", str(monitored.port)),
        *("--monitor-port", str(monitored.monitor_port), "--state-dir", str(monitored.state_dir)),
    )
    assert started.returncode == 0, started.stderr
    try:
        yield monitored
        everything = descendants(monitored.pid)
        ended = run_stageline("down", "tiny", "--state-dir", str(monitored.state_dir))
        assert ended.returncode == 0, ended.stderr
        wait_gone(everything)
    finally:
        record = read_record(monitored.state_dir / "tiny")
        if record is not None and record.is_running():
            os.kill(record.pid, signal.SIGKILL)


def test_it_says_where_to_look(up: Monitored) -> None:
    # It is ready before it says so.
    up.until(lambda: f"Boards and alerts: {up.boards}" in up.output(), "where the boards are")
    assert httpx.get(up.boards, trust_env=False, timeout=60).status_code == 200


def test_every_part_is_scraped_under_the_labels_of_a_cluster(up: Monitored) -> None:
    expected = {
        ("stageline-stage", "tiny-0-1-0"): "up",
        ("stageline-stage", "tiny-0-1-1"): "up",
        ("stageline-engine", "tiny-0-1-0"): "up",
        ("stageline-gateway", "gateway"): "up",
        ("stageline-operator", "operator"): "up",
    }
    up.until(lambda: up.targets() == expected, "targets")
    # What was scraped last may be two seconds older than what is.
    phase = 'stageline_operator_group_phase{phase="Ready"}'
    (ready,) = up.until(lambda: up.ask("query", query=phase)["result"], "a ready group")
    assert {key: ready["metric"][key] for key in ("namespace", "model", "group")} == {
        "namespace": "default", "model": "tiny", "group": "0",
    }  # fmt: skip
    wall = "stageline_stage_wall_seconds_total"

    def stages() -> list[str]:
        return sorted(each["metric"]["stage"] for each in up.ask("query", query=wall)["result"])

    up.until(lambda: stages() == ["0", "1"], "both stages")


def test_the_start_is_told_by_phase_and_the_phases_add_up(up: Monitored) -> None:
    """A model in a directory of this machine is in no cache, and nothing fetches it: a warm start."""

    def sums(query: str, label: str) -> dict[str, float]:
        found = up.ask("query", query=query)["result"]
        return {each["metric"][label]: float(each["value"][1]) for each in found}

    whole = "stageline_operator_group_time_to_ready_seconds"
    up.until(lambda: sums(f"{whole}_count", "cache").get("warm"), "a warm start")
    assert sums(f"{whole}_count", "cache") == {"cold": 0, "warm": 1, "unknown": 0}
    phases = sums('stageline_operator_group_startup_phase_seconds_sum{cache="warm"}', "phase")
    assert sorted(phases) == ["prepare", "pull", "schedule", "start"]
    assert sum(phases.values()) == pytest.approx(sums(f"{whole}_sum", "cache")["warm"], abs=0.2), phases
    assert phases["prepare"] > 0, phases
    assert phases["start"] > 0, phases
    # A scrape that came while it loaded has only the phases before.
    stage_phases = 'stageline_stage_startup_seconds{stage="1"}'
    up.until(lambda: "Warming" in sums(stage_phases, "phase"), "a scrape of the stage after its start")
    of_stage = sums(stage_phases, "phase")
    assert {"Starting", "Connecting", "Loading", "Rendezvous", "Warming"} >= set(of_stage) >= {"Loading"}, of_stage
    assert sum(of_stage.values()) <= phases["start"] + 1, "a stage starts within the group's last phase"


def test_the_shipped_rules_are_loaded_and_none_fails(up: Monitored) -> None:
    files = {path.name for path in shipped.rule_paths()}
    assert files
    up.until(lambda: all(group["lastEvaluation"][:4] != "0001" for group in up.ask("rules")["groups"]), "evaluated")
    groups = up.ask("rules")["groups"]
    assert {Path(group["file"]).name for group in groups} == files
    wrong = [(rule["name"], rule["lastError"]) for group in groups for rule in group["rules"] if rule.get("lastError")]
    assert wrong == []


@pytest.mark.skipif(not is_installed(), reason=HOW_TO_GET)
def test_every_board_is_drawn_without_an_error(up: Monitored, tmp_path: Path) -> None:
    body = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 40, "ignore_eos": True}
    assert httpx.post(f"http://127.0.0.1:{up.port}/v1/completions", json=body, timeout=60, trust_env=False).is_success
    names = [board["name"] for board in httpx.get(f"{up.boards}/facts", trust_env=False, timeout=60).json()["boards"]]
    assert names == [path.stem for path in shipped.board_paths()]
    assert names
    with browser(tmp_path, 1240, 1000) as window:
        for name in names:
            window.open(f"{up.boards}/?board={name}&range=300")
            window.until(lambda: window.run("return document.body.dataset.state") == "drawn", f"{name} is not drawn")
            panels = opened(window, name)
            assert {state for _, state, _ in panels} <= {"drawn", "no data"}, panels
            assert "drawn" in {state for _, state, _ in panels}, panels
            assert "not Grafana" in window.text("#foot")
            assert window.run(CUT) == [], f"{name} shows less than there is"
            assert window.complaints() == []


def opened(window: Browser, name: str) -> list[tuple[str, str, str]]:
    """The panels of a board with all rows open. They are made anew, and rows closed, when new series come in."""
    seen: list[tuple[str, str, str]] = []

    def are_drawn() -> bool:
        window.run(OPEN_ROWS)
        seen[:] = window.run(PANEL_STATES)
        return "waiting" not in [state for _, state, _ in seen]

    window.until(are_drawn, f"{name} is not open")
    return seen


def test_nothing_but_queries_gets_through_the_page(up: Monitored) -> None:
    for method, path in (("POST", "admin/tsdb/snapshot"), ("GET", "status/config"), ("PUT", "query")):
        answer = httpx.request(method, f"{up.boards}/prometheus/api/v1/{path}", trust_env=False, timeout=60)
        assert answer.status_code in (403, 405), (path, answer.text)
    rebound = httpx.get(f"{up.boards}/facts", headers={"host": "elsewhere.example"}, trust_env=False, timeout=60)
    assert rebound.status_code == 403


def test_a_group_that_comes_back_is_followed_to_its_new_pods(up: Monitored) -> None:
    stages = [pid for pid in descendants(up.pid) if command_line(pid)[-1:] == ["stage"]]
    assert len(stages) == 2, up.output()
    kill(stages[0])
    renewed = {("stageline-stage", "tiny-0-2-0"), ("stageline-stage", "tiny-0-2-1"), ("stageline-engine", "tiny-0-2-0")}

    def followed() -> bool:
        targets = up.targets()
        old = [pod for _, pod in targets if "-0-1-" in pod]
        return not old and all(targets.get(each) == "up" for each in renewed)

    up.until(followed, "targets of the second incarnation")
    restarts = 'stageline_operator_group_restarts_total{namespace="default",model="tiny",failure_class="Killed"}'
    up.until(lambda: [each["value"][1] for each in up.ask("query", query=restarts)["result"]] == ["1"], "restarts")


def test_a_prometheus_that_dies_is_reported_and_comes_back(up: Monitored) -> None:
    (first,) = up.processes("prometheus")
    kill(first)
    up.until(lambda: re.search(r"Prometheus exited with status 137", up.output()), "a report")
    up.until(lambda: up.processes("prometheus") not in ([], [first]), "a new process")
    up.until(
        lambda: httpx.get(f"{up.boards}/prometheus/api/v1/query?query=up", trust_env=False, timeout=60).is_success,
        "an answer again",
    )
    assert json.dumps(up.targets())
