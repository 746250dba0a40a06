"""What `up --monitor` tells Prometheus, from pods and rules: pure, without a process."""

import random
import string
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from stageline_api import labels
from stageline_api.errors import UserError
from stageline_local.monitoring.options import MonitorOptions, find_prometheus
from stageline_local.monitoring.prometheus import PrometheusServer
from stageline_local.monitoring.scrape import (
    ENGINE_JOB,
    STAGE_JOB,
    pod_targets,
    prometheus_config,
    quickened,
    seconds_of,
)


def pod(stage: int, phase: str = "Running", address: str = "127.64.0.1", **metadata: str) -> dict[str, Any]:
    own = {labels.MODEL: "tiny", labels.GROUP: "1", labels.STAGE: str(stage), labels.INCARNATION: "3"}
    named = {"name": f"tiny-1-3-{stage}", "namespace": "team", "labels": own}
    return {"metadata": named | metadata, "status": {"phase": phase, "podIP": address}}


def test_each_stage_is_a_target_and_stage_0_has_an_engine_too() -> None:
    targets = pod_targets([pod(0), pod(1, address="127.64.0.2")])
    common = {"namespace": "team", "model": "tiny", "group": "1"}
    assert targets == {
        STAGE_JOB: [
            {"targets": ["127.64.0.1:9100"], "labels": {**common, "pod": "tiny-1-3-0"}},
            {"targets": ["127.64.0.2:9100"], "labels": {**common, "pod": "tiny-1-3-1"}},
        ],
        ENGINE_JOB: [{"targets": ["127.64.0.1:8002"], "labels": {**common, "pod": "tiny-1-3-0"}}],
    }


@pytest.mark.parametrize(
    "absent",
    [
        pytest.param(pod(0, "Pending"), id="its init container still runs"),
        pytest.param(pod(0, "Failed"), id="failed"),
        pytest.param(pod(0, deletionTimestamp="2026-01-01T00:00:00Z"), id="being deleted"),
        pytest.param(pod(0, address=""), id="no address yet"),
    ],
)
def test_a_pod_that_can_not_answer_is_no_target(absent: dict[str, Any]) -> None:
    assert pod_targets([absent]) == {STAGE_JOB: [], ENGINE_JOB: []}


def test_the_jobs_have_the_names_that_the_chart_gives_them() -> None:
    config = prometheus_config(Path("/t"), [Path("/r.yaml")], "team", "127.0.0.1:1", "127.0.0.1:2", 2)
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    assert jobs.keys() == {"stageline-stage", "stageline-engine", "stageline-gateway", "stageline-operator"}
    assert config["rule_files"] == ["/r.yaml"]
    # Its series name namespace and model themselves.
    assert [name for name, job in jobs.items() if job.get("honor_labels")] == ["stageline-operator"]


def test_targets_are_written_only_when_they_change(tmp_path: Path) -> None:
    server = PrometheusServer("prometheus", tmp_path, tmp_path / "log", 1, lambda _: None)
    server.set_targets(pod_targets([pod(0)]))
    file = server.targets_dir / f"{STAGE_JOB}.json"
    first = file.stat().st_ino
    server.set_targets(pod_targets([pod(0)]))
    assert file.stat().st_ino == first
    server.set_targets(pod_targets([]))
    assert file.read_text() == "[]\n"


RULES = {
    "groups": [
        {
            "name": "g",
            "interval": "30s",
            "rules": [
                {"record": "a:b:c", "expr": "up"},
                {"alert": "A", "expr": "rate(x[5m]) > 1", "for": "5m", "keep_firing_for": "1m30s"},
                {"alert": "B", "expr": "up == 0"},
            ],
        }
    ]
}


@pytest.mark.parametrize(
    ("alert_speed", "holds"),
    [
        (1.0, {"for": "300000ms", "keep_firing_for": "90000ms"}),
        (10.0, {"for": "30000ms", "keep_firing_for": "9000ms"}),
    ],
)
def test_rules_are_evaluated_at_every_scrape_and_in_a_drill_hold_for_a_shorter_time(
    tmp_path: Path, alert_speed: float, holds: dict[str, str]
) -> None:
    """An interval of a rule's own may be longer than Prometheus looks back here: what it records would come and go."""
    shipped = tmp_path / "alerts.yaml"
    shipped.write_text(yaml.safe_dump(RULES))
    server = PrometheusServer("prometheus", tmp_path / "prometheus", tmp_path / "log", 1, lambda _: None)
    (copy,) = server.write_rules([shipped], alert_speed)
    expected = yaml.safe_load(shipped.read_text())
    expected["groups"][0]["rules"][1] |= holds
    del expected["groups"][0]["interval"]
    assert yaml.safe_load(copy.read_text()) == expected


@given(st.lists(st.sampled_from("dhms"), min_size=1, max_size=4, unique=True), st.randoms())
def test_durations_are_read_as_prometheus_writes_them(units: list[str], chance: random.Random) -> None:
    seconds = {"d": 86400, "h": 3600, "m": 60, "s": 1}
    parts = [(chance.randint(0, 99), unit) for unit in sorted(units, key="dhms".index)]
    text = "".join(f"{number}{unit}" for number, unit in parts)
    assert seconds_of(text) == sum(number * seconds[unit] for number, unit in parts)


def test_no_time_at_all_needs_no_unit() -> None:
    assert seconds_of("0") == seconds_of("0s") == 0


@pytest.mark.parametrize("text", ["", "5", "5 m", "m", "-1s", "5m!", string.ascii_letters])
def test_anything_else_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="not a Prometheus duration"):
        seconds_of(text)


def test_every_shipped_alert_can_be_quickened() -> None:
    for path in MonitorOptions.with_shipped(1, 1.0).rules:
        rules = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert len(quickened(rules, 10.0)["groups"]) == len(rules["groups"])


def test_a_missing_prometheus_is_named_with_the_command_that_gets_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="apt-get install prometheus"):
        find_prometheus(str(tmp_path))
