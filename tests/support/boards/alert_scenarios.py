"""Scripted series, and exactly which alerts they bring about and when, in the form that `promtool test rules` checks.

A scenario lists what fires at each of its moments; every other shipped alert must be silent then. The expected
annotations are made from the rules' own text and the scenario's labels and values, so that a template that names a
label the alert does not have, or says a number wrongly, fails.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from boards.rule_names import shipped_rules
from stageline_dashboards.shipped import rule_paths

_LABEL: Final = re.compile(r"\{\{ \$labels\.(\w+) \}\}")
_WITH: Final = re.compile(r"\{\{ with \$labels\.(\w+) \}\}(.*?)\{\{ end \}\}")
_ENDLESS: Final = re.compile(r"\{\{ if gt \$value 86400\.0 \}\}(.*?)\{\{ else \}\}(.*?)\{\{ end \}\}")
_ASKED: Final = re.compile(r"\{\{ range query .*?\{\{ end \}\}")
_VALUE: Final = re.compile(r"\{\{ \$value[^}]*\}\}")


KV_SLOTS: Final = 8
"""Of every group in these scenarios."""


@dataclass(frozen=True)
class Firing:
    """One alert that fires. `value` is how its description says the value, `labels` are all but those of the rule."""

    alert: str
    labels: Mapping[str, str]
    value: str = ""
    severity: str | None = None
    """Which of several rules of that name; None where there is one."""
    window: str | None = None
    """The long window of which burn rule."""
    asked: str = ""
    """What the description says of series that it asks for."""


@dataclass(frozen=True)
class Scenario:
    """What is scraped, in promtool's notation, every `step`; and what fires at which moment."""

    name: str
    series: Mapping[str, str]
    firing_at: Mapping[str, tuple[Firing, ...]]
    spares: tuple[str, ...] = ()
    """Alerts that this comes close to and that must not fire: for each there is a reason in the scenario's name."""
    step: str = "15s"
    evaluated_every: str = "30s"


def alerting_rules() -> list[dict[str, Any]]:
    """Every alerting rule that is shipped, in order."""
    return [rule for rule in shipped_rules() if "alert" in rule]


def alert_names() -> list[str]:
    """Each once, in order."""
    return list(dict.fromkeys(rule["alert"] for rule in alerting_rules()))


def write_cases(scenario: Scenario, path: Path, rules: Iterable[Path] | None = None) -> None:
    """The scenario as a file for `promtool test rules`, of the shipped rules unless others are given."""
    checks = [
        {
            "eval_time": moment,
            "alertname": name,
            "exp_alerts": [_expected(each) for each in firing if each.alert == name],
        }
        for moment, firing in scenario.firing_at.items()
        for name in alert_names()
    ]
    test = {
        "name": scenario.name,
        "interval": scenario.step,
        "input_series": [{"series": name, "values": values} for name, values in scenario.series.items()],
        "alert_rule_test": checks,
    }
    document = {
        "rule_files": list(map(str, rule_paths() if rules is None else rules)),
        "evaluation_interval": scenario.evaluated_every,
        "tests": [test],
    }
    path.write_text(yaml.safe_dump(document, sort_keys=False, width=10_000), encoding="utf-8")


def _expected(firing: Firing) -> dict[str, Any]:
    rule = _rule_of(firing)
    labels = {**firing.labels, **rule["labels"]}
    texts = {key: _filled_in(text, labels, firing) for key, text in rule["annotations"].items()}
    return {"exp_labels": labels, "exp_annotations": texts}


def _filled_in(text: str, labels: Mapping[str, str], firing: Firing) -> str:
    """What Prometheus makes of those of Go's templates that the rules use."""
    value = firing.value
    text = _ASKED.sub(lambda _: firing.asked, text)
    text = _WITH.sub(lambda found: found[2].replace("{{ . }}", labels[found[1]]) if found[1] in labels else "", text)
    text = _ENDLESS.sub(lambda found: found[1 if value == "+Inf" else 2], text)
    return _VALUE.sub(lambda _: value, _LABEL.sub(lambda found: labels.get(found[1], ""), text))


def _rule_of(firing: Firing) -> dict[str, Any]:
    found = [
        rule
        for rule in alerting_rules()
        if rule["alert"] == firing.alert
        and firing.severity in (None, rule["labels"]["severity"])
        and firing.window in (None, rule["labels"].get("long_window"))
    ]
    assert len(found) == 1, f"{firing} is {len(found)} rules"
    return found[0]


@dataclass(frozen=True)
class Pipeline:
    """Series of one group's stages and engine, whose shares of time are known."""

    busy: tuple[float, ...]
    """Share of wall time that each stage computes; the rest but `idle` it waits."""
    idle: float = 0.0
    group: str = "0"
    waiting: int = 0
    running: int = 8
    kv_usage: float = 0.5
    room: tuple[int, ...] = ()
    """Tokens of cache that each stage's memory has room for; enough where nothing is said."""
    empty_cohorts: int = 0
    """Of as many as there are stages."""

    @property
    def labels(self) -> dict[str, str]:
        """Of the group."""
        return {"namespace": "team", "model": "smollm2", "model_name": "smollm2-chat", "group": self.group}

    @property
    def capacities(self) -> tuple[int, ...]:
        """Tokens by what bounds the cache: all slots full, and each stage's memory."""
        return (KV_SLOTS * 256, *self.room)

    def series(self, steps: int, step_seconds: float = 15) -> dict[str, str]:
        """By name, over so many steps."""
        found: dict[str, str] = {}
        for stage, busy in enumerate(self.busy):
            labels = {**self.labels, "stage": str(stage), "pod": f"smollm2-{self.group}-{stage}"}

            def grow(name: str, share: float, labels: Mapping[str, str] = labels, **more: str) -> None:
                selector = series(f"stageline_stage_{name}_seconds_total", **{**labels, **more})
                found[selector] = f"0+{share * step_seconds:.6g}x{steps}"

            grow("busy", busy, kind="decode")
            grow("wait", 1 - self.idle - busy, reason="recv")
            grow("idle", self.idle)
            grow("wall", 1)
            found[series("stageline_stage_incarnation", **labels)] = f"1x{steps}"
            found[series("stageline_stage_kv_slots", **labels)] = f"{KV_SLOTS}x{steps}"
            found[series("stageline_stage_kv_capacity_tokens", **labels)] = f"{min(self.capacities)}x{steps}"
        engine = {**self.labels, "pod": f"smollm2-{self.group}-0"}
        for stage, room in enumerate(self.room):
            found[series("stageline_kv_room_tokens", **engine, stage=str(stage))] = f"{room}x{steps}"
        for cohort in range(len(self.busy)):
            members = 0 if cohort < self.empty_cohorts else 2
            found[series("stageline_cohort_requests", **engine, cohort=str(cohort))] = f"{members}x{steps}"
        found[series("stageline_num_requests_waiting", **engine)] = f"{self.waiting}x{steps}"
        found[series("stageline_num_requests_running", **engine)] = f"{self.running}x{steps}"
        found[series("stageline_kv_cache_usage_ratio", **engine)] = f"{self.kv_usage}x{steps}"
        return found


def series(name: str, **labels: str) -> str:
    """A series' name in promtool's notation."""
    return name + "{" + ", ".join(f'{key}="{value}"' for key, value in labels.items()) + "}"
