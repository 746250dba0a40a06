"""How long groups took to get ready and to come back, as the operator and the stages themselves have recorded it. Pure.

The operator adds up all starts since it began, so one start is what two readings of its page differ by.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

from prometheus_client.parser import text_string_to_metric_families

from stageline_operator.controller.telemetry import metric_names as operator
from stageline_operator.controller.telemetry.startup import StartupPhase
from stageline_runtime.metric_names import STAGE_STARTUP

STAGE_PHASES: Final = ("Starting", "Connecting", "Loading", "Rendezvous", "Warming")
"""Of a stage, in the order in which it leaves them."""
_Key = TypeVar("_Key", str, tuple[str, str])


class Total(NamedTuple):
    """Of a histogram: the sum of its samples in seconds, and how many there are."""

    seconds: float
    samples: int


@dataclass(frozen=True, slots=True)
class Recorded:
    """Starts by cache, their phases by (phase, cache), recoveries by class of the failure."""

    starts: Mapping[str, Total]
    phases: Mapping[tuple[str, str], Total]
    recoveries: Mapping[str, Total]

    @property
    def events(self) -> tuple[int, int]:
        """How many starts there were, and how many recoveries."""
        return _events(self.starts), _events(self.recoveries)

    def since(self, before: "Recorded") -> "Recorded":
        """What came after another reading; nothing of what did not happen."""
        return Recorded(
            _more(self.starts, before.starts),
            _more(self.phases, before.phases),
            _more(self.recoveries, before.recoveries),
        )


def read_operator(page: str) -> Recorded:
    """From the operator's page in Prometheus' text form."""
    starts = _totals(page, operator.TIME_TO_READY.name, "cache")
    phases = _totals(page, operator.STARTUP_PHASE.name, "phase", "cache")
    recoveries = _totals(page, operator.RECOVERY.name, "failure_class")
    return Recorded(
        {cache: total for (cache,), total in starts.items()},
        {(phase, cache): total for (phase, cache), total in phases.items()},
        {failure_class: total for (failure_class,), total in recoveries.items()},
    )


def slowest_stage(pages: Iterable[str]) -> dict[str, float]:
    """Seconds that the slowest stage spent in each phase of its start, from the stages' own pages."""
    found: dict[str, float] = {}
    for page in pages:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name == STAGE_STARTUP.name:
                    phase = sample.labels["phase"]
                    found[phase] = max(found.get(phase, 0.0), sample.value)
    return found


def start_of(recorded: Recorded, stages: Mapping[str, float]) -> dict[str, Any]:
    """The one start that was recorded, as a round of a result. Raises ValueError where there is not exactly one."""
    if [total.samples for total in recorded.starts.values()] != [1]:
        raise ValueError(f"not one start: {recorded.starts}")
    ((cache, whole),) = recorded.starts.items()
    return {
        "cache": cache,
        "seconds": round(whole.seconds, 3),
        "phases": {
            str(phase): round(recorded.phases[phase, cache].seconds, 3)
            for phase in StartupPhase
            if (phase, cache) in recorded.phases
        },
        "stages": {phase: round(stages[phase], 3) for phase in STAGE_PHASES if phase in stages},
    }


def recovery_of(recorded: Recorded) -> dict[str, Any]:
    """The one recovery that was recorded. Raises ValueError where there is not exactly one."""
    if [total.samples for total in recorded.recoveries.values()] != [1]:
        raise ValueError(f"not one recovery: {recorded.recoveries}")
    ((failure_class, total),) = recorded.recoveries.items()
    return {"failure_class": failure_class, "recorded_seconds": round(total.seconds, 3)}


def _events(totals: Mapping[str, Total]) -> int:
    return sum(each.samples for each in totals.values())


def _totals(page: str, histogram: str, *labels: str) -> dict[tuple[str, ...], Total]:
    sums: dict[tuple[str, ...], float] = {}
    counts: dict[tuple[str, ...], int] = {}
    for family in text_string_to_metric_families(page):
        if family.name == histogram:
            for sample in family.samples:
                key = tuple(sample.labels.get(label, "") for label in labels)
                if sample.name.endswith("_sum"):
                    sums[key] = sample.value
                elif sample.name.endswith("_count"):
                    counts[key] = int(sample.value)
    return {key: Total(sums[key], count) for key, count in counts.items() if count}


def _more(after: Mapping[_Key, Total], before: Mapping[_Key, Total]) -> dict[_Key, Total]:
    none = Total(0.0, 0)
    pairs = {key: (total, before.get(key, none)) for key, total in after.items()}
    return {
        key: Total(now.seconds - then.seconds, now.samples - then.samples)
        for key, (now, then) in pairs.items()
        if now.samples > then.samples
    }
