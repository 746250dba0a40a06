"""What groups' starts and recoveries are published from: the operator's own record, one start at a time."""

import json
from pathlib import Path

import pytest
import yaml

from oracles.tiny_models import write_tiny_llama
from stageline_bench.runtime.record.results import Result, this_machine
from stageline_operator.controller.telemetry.metrics import OperatorMetrics
from stageline_operator.controller.telemetry.startup import Cache, Startup, StartupPhase
from stageline_operator.controller.telemetry.transitions import Transition
from starts import program
from starts.page import section_of
from starts.recorded import Recorded, read_operator, recovery_of, slowest_stage, start_of

COLD = Startup(30.0, Cache.COLD, dict(zip(StartupPhase, (1.0, 2.0, 20.0, 7.0), strict=True)))
WARM = Startup(9.0, Cache.WARM, dict(zip(StartupPhase, (1.0, 0.5, 1.0, 6.5), strict=True)))


def recorded_of(metrics: OperatorMetrics) -> Recorded:
    page, _ = metrics.registry.exposition("text/plain")
    return read_operator(page.decode())


def test_one_start_is_what_two_readings_differ_by() -> None:
    metrics = OperatorMetrics()
    metrics.count_transition("team", "chat", Transition(startups=(COLD,)))
    first = recorded_of(metrics)
    assert first.events == (1, 0)
    metrics.count_transition("team", "chat", Transition(startups=(WARM,), recoveries=(("Killed", 10.5),)))
    second = recorded_of(metrics).since(first)
    assert second.events == (1, 1)
    stages = {"Starting": 2.0, "Loading": 3.0, "Warming": 0.25}
    assert start_of(second, stages) == {
        "cache": "warm",
        "seconds": 9.0,
        "phases": {"schedule": 1.0, "pull": 0.5, "prepare": 1.0, "start": 6.5},
        "stages": stages,
    }
    assert recovery_of(second) == {"failure_class": "Killed", "recorded_seconds": 10.5}
    assert recorded_of(metrics).since(recorded_of(metrics)).events == (0, 0)


def test_two_starts_between_two_readings_are_not_taken_for_one() -> None:
    metrics = OperatorMetrics()
    metrics.count_transition("team", "chat", Transition(startups=(WARM, WARM), recoveries=(("Killed", 1.0),) * 2))
    with pytest.raises(ValueError, match="not one start"):
        start_of(recorded_of(metrics), {})
    with pytest.raises(ValueError, match="not one recovery"):
        recovery_of(recorded_of(metrics))


def test_of_the_stages_the_slowest_counts_in_each_phase() -> None:
    name = "stageline_stage_startup_seconds"
    pages = [
        f'# TYPE {name} gauge\n{name}{{stage="0",phase="Loading"}} 3.0\n{name}{{stage="0",phase="Warming"}} 0.5\n',
        f'# TYPE {name} gauge\n{name}{{stage="1",phase="Loading"}} 2.0\n{name}{{stage="1",phase="Warming"}} 0.75\n',
        "",
    ]
    assert slowest_stage(pages) == {"Loading": 3.0, "Warming": 0.75}


def test_the_page_has_starts_by_cache_and_phase_and_recoveries_by_cause() -> None:
    def start(cache: str, seconds: float) -> dict[str, object]:
        return {"cache": cache, "seconds": seconds, "phases": {"prepare": seconds / 2}, "stages": {"Loading": 1.0}}

    def recovery(what: str, failure_class: str, seconds: float) -> dict[str, object]:
        return {"what": what, "failure_class": failure_class, "recorded_seconds": seconds, "seconds": seconds + 1}

    killed = [recovery("a stage is killed", "Killed", seconds) for seconds in (6.0, 8.0)]
    rounds = [
        {"place": "laptop", "start": start("cold", 40.0)},
        *({"place": "laptop", "start": start("warm", 10.0), "recovery": each} for each in killed),
        {"place": "cluster", "start": start("warm", 12.0), "recovery": recovery("a node is lost", "NodeLost", 20.0)},
    ]
    result = Result(
        program="starts", date="2026-11-25", machine=this_machine(), parameters={}, rounds=rounds, targets=[]
    )
    section = section_of(result)
    assert "| laptop, cold (1) | 40.0 | - | - | 20.0 | - | - | 1.0 | - | - |" in section
    assert "| laptop, warm (2) | 10.0 |" in section
    assert "| laptop: a stage is killed (2) | `Killed` | 7.0 | 8.0 |" in section
    assert "| cluster: a node is lost (1) | `NodeLost` | 20.0 | 21.0 |" in section


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_round_on_this_machine_tells_a_start_and_what_each_blow_took(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model", num_layers=4)
    document = {
        "apiVersion": "stageline.dev/v1alpha1",
        "kind": "PipelineModel",
        "metadata": {"name": "tiny"},
        "spec": {"model": {"source": f"file://{model}"}, "parallelism": {"pipeline": 2}},
    }
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(document))
    page = tmp_path / "page.md"
    page.write_text("<!-- begin starts -->\nold\n<!-- end starts -->\n")
    where = ("--model", str(tmp_path / "tiny.yaml"), "--results", str(tmp_path / "results"), "--page", str(page))
    program.main(["--rounds", "1", "--only", "laptop", *where])
    (file,) = (tmp_path / "results").glob("*-starts.json")
    first, killed, stopped = json.loads(file.read_text())["rounds"]
    assert first["start"]["cache"] == "warm", "nothing fetches a directory of this machine"
    assert [each["recovery"]["failure_class"] for each in (killed, stopped)] == ["Killed", "StepTimeout"]
    for each in (first, killed, stopped):
        phases = each["start"]["phases"]
        assert sum(phases.values()) == pytest.approx(each["start"]["seconds"], abs=0.1), each
        assert each["start"]["stages"]["Loading"] > 0, each
    for each in (killed, stopped):
        assert 0 < each["recovery"]["recorded_seconds"] <= each["recovery"]["seconds"] + 0.5, each
    assert "| laptop: a stage is killed (1) | `Killed` |" in page.read_text()
