"""What a soak came to, for a person: figures, then every failure. Pure."""

from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Final

from chaos.soak_disturber import Disturber
from chaos.soak_pipeline import PipelineSoak
from chaos.soak_requests import KINDS
from chaos.soak_vitals import MEBIBYTE, Vitals, leak, lives

_MOST_FAILURES_SHOWN: Final = 20


def failures_of(state: PipelineSoak) -> list[str]:
    """Everything that was wrong."""
    tally = state.tally
    failures = [*state.failures, *tally.failures, *(state.disturber.failures if state.disturber else ())]
    if tally.has_too_many_parted:
        failures.append(f"{tally.parted} of {tally.answered.total()} answers parted: too many for near ties")
    failures += [f"grew: {said}" for first, last in lives(state.rests) if (said := leak(first, last))]
    if state.is_over and state.disturber and state.disturber.blows and not tally.resumes:
        failures.append("no answer was resumed: the blows fell beside the answers")
    return failures


def report_lines(state: PipelineSoak) -> list[str]:
    """The whole report, its failures last."""
    failures = failures_of(state)
    shown = failures[:_MOST_FAILURES_SHOWN]
    hidden = len(failures) - len(shown)
    return [
        f"pipeline: seed {state.seed}, {state.minutes:g} minutes asked, {'over' if state.is_over else 'NOT FINISHED'}",
        *_request_lines(state),
        *(_blow_lines(state.disturber) if state.disturber else []),
        *vitals_lines(state.rests),
        f"failures: {len(failures)}",
        *(f"  {failure}" for failure in shown),
        *([f"  and {hidden} more"] if hidden else []),
    ]


def _request_lines(state: PipelineSoak) -> list[str]:
    tally = state.tally
    lines = [
        f"requests: {tally.answered.total()} answered, {tally.resumed.total()} resumed ({tally.resumes} times), "
        f"{tally.parted} parted at a near tie, {tally.broken_by_gateway} broken by the gateway's own death"
    ]
    by_kind = (f"{kind} {tally.answered[kind]} ({tally.resumed[kind]})" for kind in KINDS)
    return [*lines, f"  by kind, resumed in brackets: {', '.join(by_kind)}"]


def _blow_lines(disturber: Disturber) -> list[str]:
    counts = Counter(disturber.blows)
    named = ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"
    lines = [f"blows: {counts.total()} ({named})"]
    for name in sorted({recovery.blow for recovery in disturber.recoveries}):
        seconds = [each.seconds for each in disturber.recoveries if each.blow == name]
        lines.append(f"  back after: {name}: median {median(seconds):.1f} s, worst {max(seconds):.1f} s")
    killed = [each.seconds for each in disturber.recoveries if "killed" in each.blow]
    if killed:
        lines.append(f"  back after any kill: median {median(killed):.1f} s, worst {max(killed):.1f} s")
    return lines


def vitals_lines(rests: Sequence[Sequence[Vitals]]) -> list[str]:
    """By role at the first rest and the last, and how many processes lived long enough to be judged."""
    if not rests:
        return []
    first, last = ({one.role: one for one in rest} for rest in (rests[0], rests[-1]))
    lines = ["at rest, first and last: resident MiB, descriptors, threads (* another process of the same role)"]
    for role in sorted(first.keys() & last.keys()):
        one, other = first[role], last[role]
        again = "" if (one.pid, one.start_ticks) == (other.pid, other.start_ticks) else " *"
        lines.append(f"  {role}: {_figures(one)} -> {_figures(other)}{again}")
    judged = lives(rests)
    lines.append(f"  judged for leaks: {len(judged)} processes that were there at two rests or more")
    if judged:
        one, other = max(judged, key=lambda life: life[1].resident - life[0].resident)
        lines.append(f"  most memory gained by one of them: {one.role}, {_figures(one)} -> {_figures(other)}")
    return lines


def _figures(vitals: Vitals) -> str:
    return f"{vitals.resident / MEBIBYTE:.0f} MiB, {vitals.files}, {vitals.threads}"
