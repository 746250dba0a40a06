"""The section of docs/dev/benchmarks.md on starts and recoveries. Pure."""

from collections.abc import Iterable
from statistics import median
from typing import Any, Final

from stageline_bench.runtime.record.results import Result
from stageline_operator.controller.telemetry.startup import StartupPhase
from starts.recorded import STAGE_PHASES

WITHIN_START: Final = STAGE_PHASES[1:]
"""What a stage does after its process has begun; before that it loads Python and torch."""


def section_of(result: Result) -> str:
    """Medians over the rounds, in seconds."""
    machine = result.machine
    parameters = "; ".join(f"{name} {value}" for name, value in result.parameters.items())
    return (
        f"{result.date}, {machine.cpu}, {machine.cores} cores, torch {machine.torch}, Python {machine.python}; "
        f"load average before the first round {machine.load_average}.\n\n{parameters}.\n\n"
        f"{_starts(result.rounds)}\n{_recoveries(result.rounds)}"
    )


def _starts(rounds: list[dict[str, Any]]) -> str:
    phases = [str(phase) for phase in StartupPhase]
    lines = [
        f"| Start, medians in s | Ready after | {' | '.join(phases)} | of it {' | '.join(WITHIN_START)} |",
        "|---|" + "---|" * (1 + len(phases) + len(WITHIN_START)),
    ]
    kinds = dict.fromkeys((each["place"], each["start"]["cache"]) for each in rounds)
    for place, cache in kinds:
        starts = [each["start"] for each in rounds if (each["place"], each["start"]["cache"]) == (place, cache)]
        cells = [_median(one["seconds"] for one in starts)]
        cells += [_median(one["phases"].get(phase) for one in starts) for phase in phases]
        cells += [_median(one["stages"].get(phase) for one in starts) for phase in WITHIN_START]
        lines.append(f"| {place}, {cache} ({len(starts)}) | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _recoveries(rounds: list[dict[str, Any]]) -> str:
    lines = [
        "| Recovery, medians in s | Class | From the failure, as recorded | From what was done |",
        "|---|---|---|---|",
    ]
    found = [(each["place"], each["recovery"]) for each in rounds if "recovery" in each]
    for kind in dict.fromkeys((place, one["what"], one["failure_class"]) for place, one in found):
        same = [one for place, one in found if (place, one["what"], one["failure_class"]) == kind]
        recorded, seconds = (_median(one[name] for one in same) for name in ("recorded_seconds", "seconds"))
        place, what, failure_class = kind
        lines.append(f"| {place}: {what} ({len(same)}) | `{failure_class}` | {recorded} | {seconds} |")
    return "\n".join(lines) + "\n"


def _median(values: Iterable[float | None]) -> str:
    known = [each for each in values if each is not None]
    return f"{median(known):.1f}" if known else "-"
