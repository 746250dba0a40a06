"""What every query of every board answers in each of the scripted scenarios, asked once of one real Prometheus."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from boards.backfilled_prometheus import BackfilledPrometheus, running_prometheus, write_blocks
from boards.board_queries import BOARDS, BoardQuery, choices, every_expression, filled_in, queries_of
from boards.fleet_scenarios import LENGTH_SECONDS, SCENARIOS
from boards.metric_history import MetricHistory
from boards.recorded_history import record, recorded_names, rounds_of

BEGINS_AT: Final = 1_767_225_600
"""Midnight before the first scenario; blocks of Prometheus begin at such times."""
APART_SECONDS: Final = 4 * 86400
"""From one scenario to the next: further than any window looks back."""
ASKED_EVERY_SECONDS: Final = 60
CHOSEN: Final = {"model": "chat"}
ONE_OF_THE_REPEATED: Final = {"stage": "1"}
"""What Grafana fills into one of the panels that are drawn once for each stage."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Series by scenario and query, over the whole hour: an instant query is one with the answer of its last moment."""

    series: Mapping[tuple[str, BoardQuery], list[dict[str, Any]]]

    def at(self, second: int, scenario: str, board: str, title: str, ref: str = "A") -> dict[str, float]:
        """What a panel says at one moment of a scenario: values by their labels, those of a table's column by `ref`."""
        moment = begin_of(scenario) + second
        assert second % ASKED_EVERY_SECONDS == 0, second
        return {
            _name_of(each["metric"]): float(value)
            for each in self.of(scenario, board, title, ref)
            for at, value in each["values"]
            if at == moment
        }

    def of(self, scenario: str, board: str, title: str, ref: str = "A") -> list[dict[str, Any]]:
        """The series of one query of a panel."""
        found = [
            v for (s, q), v in self.series.items() if (s, q.board, q.title, q.ref) == (scenario, board, title, ref)
        ]
        assert len(found) == 1, f"{board} has {len(found)} panels {title!r} with a query {ref}"
        return found[0]


def _name_of(labels: Mapping[str, str]) -> str:
    """Values of its labels but the namespace, which all scenarios share, in the order of their names."""
    return " ".join(text for key, text in sorted(labels.items()) if key not in ("namespace", "__name__"))


def begin_of(scenario: str) -> int:
    """When it begins."""
    return BEGINS_AT + APART_SECONDS * list(SCENARIOS).index(scenario)


@contextmanager
def prometheus_of_scenarios(directory: Path) -> Iterator[BackfilledPrometheus]:
    """All scenarios in one server, days apart, with what the recording rules make of them."""
    data = directory / "data"
    write_blocks((each.open_metrics(begin_of(each.name)) for each in SCENARIOS.values()), data)
    needed = recorded_names(expr for path in BOARDS.values() for expr in every_expression(path))
    for names in rounds_of(needed):
        histories = []
        with running_prometheus(data) as prometheus:
            for scenario in SCENARIOS:
                histories.append(MetricHistory())
                start = begin_of(scenario)
                record(names, prometheus, start, start + LENGTH_SECONDS, histories[-1])
        write_blocks((each.open_metrics() for each in histories), data)
    with running_prometheus(data) as prometheus:
        yield prometheus


def asked(prometheus: BackfilledPrometheus) -> Answers:
    """Ask everything of all scenarios."""
    said = (asked_of(board, scenario, prometheus, CHOSEN) for scenario in SCENARIOS for board in BOARDS)
    return Answers({key: series for each in said for key, series in each.series.items()})


def asked_of(
    board: str,
    scenario: str,
    prometheus: BackfilledPrometheus,
    chosen: Mapping[str, str],
    step: int = ASKED_EVERY_SECONDS,
) -> Answers:
    """Ask everything of one board, with values of variables `chosen`."""
    start = begin_of(scenario)
    end = start + LENGTH_SECONDS
    values = choices(board, prometheus, start, end, chosen) | ONE_OF_THE_REPEATED
    exprs = {query: filled_in(query.expr, values) for query in queries_of(board)}
    return Answers({(scenario, query): prometheus.between(expr, start, end, step) for query, expr in exprs.items()})
