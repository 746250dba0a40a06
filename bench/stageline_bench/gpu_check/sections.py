"""Runs the parts of the check one after another and renders the table of docs/dev/gpu-check.md.

Each part ends passed, failed or skipped with a reason, and none stops the rest: a hanging part is abandoned. Only a
library call that never returns to Python ends the whole check (`_time_limit`).
"""

import faulthandler
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from stageline_api.errors import UserError

Figures = dict[str, str]
"""Results of a part by name, as printed."""
MOST_SECONDS = 240.0
"""Time limit of a part; the longest starts four groups and runs sixteen rounds."""
RETURN_SECONDS = 30.0
"""Time for an abandoned part to return to Python before the check ends."""


class Status(StrEnum):
    """The result of a part; `UNPROVEN` means that it has not run on a GPU."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    UNPROVEN = "unproven"


class SkipSectionError(Exception):
    """This machine can't run the part; the message names the missing requirement."""


class CheckFailedError(Exception):
    """The part ran and its result is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One part of the check."""

    name: str
    shows: str
    """The claim that it proves, for the page."""
    run: Callable[[], Figures]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one part."""

    name: str
    shows: str
    status: Status
    detail: str
    """The figures, or the reason why it failed or was skipped."""


def choose(sections: Sequence[Section], names: Sequence[str]) -> tuple[Section, ...]:
    """The sections of these names, in their usual order; no name selects all.

    Raises:
        UserError: an unknown name.
    """
    known = [section.name for section in sections]
    for name in names:
        if name not in known:
            raise UserError(f"--part {name!r}: no such part; there are {', '.join(known)}")
    return tuple(section for section in sections if not names or section.name in names)


def run_sections(
    sections: Sequence[Section], say: Callable[[str], None], most_seconds: float = MOST_SECONDS
) -> list[Outcome]:
    """Every part's outcome, in order; `say` gets each as it finishes. A part that takes `most_seconds` has failed."""
    outcomes = []
    for section in sections:
        say(f"{section.name} …")
        began = time.monotonic()
        status, detail = _run(section, most_seconds)
        say(f"{section.name}: {status}: {detail} ({time.monotonic() - began:.1f} s)")
        outcomes.append(Outcome(name=section.name, shows=section.shows, status=status, detail=detail))
    return outcomes


def unproven(sections: Sequence[Section]) -> list[Outcome]:
    """Outcomes for parts that have not run on a GPU."""
    return [
        Outcome(name=section.name, shows=section.shows, status=Status.UNPROVEN, detail="no GPU has run this yet")
        for section in sections
    ]


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """1 if a part failed."""
    return int(any(outcome.status is Status.FAILED for outcome in outcomes))


def render(outcomes: Sequence[Outcome], header: str) -> str:
    """Markdown: a line with machine and date, then a row for each part."""
    lines = [header, "", "| Part | What it shows | Result | Figures |", "|---|---|---|---|"]
    lines += [
        f"| {outcome.name} | {outcome.shows} | {outcome.status} | {_cell(outcome.detail)} |" for outcome in outcomes
    ]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise CheckFailedError in code that runs longer, as soon as it is in Python.

    A library that never returns there ends the process `RETURN_SECONDS` later: the threads' stacks go to standard
    error, no later part runs and no page is written. A timer of the caller, such as pytest-timeout's, is restored
    afterwards; if it expired, it fires then.
    """

    def give_up(_signal: int, _frame: object) -> None:
        raise CheckFailedError(f"given up after {seconds:g} s")

    began = time.monotonic()
    handler = signal.signal(signal.SIGALRM, give_up)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(seconds + RETURN_SECONDS, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            at_once = 1e-3  # zero would stop it
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), at_once), interval)


def _run(section: Section, most_seconds: float) -> tuple[Status, str]:
    try:
        with _time_limit(most_seconds):
            figures = section.run()
    except SkipSectionError as reason:
        return Status.SKIPPED, str(reason)
    except CheckFailedError as failure:
        return Status.FAILED, str(failure)
    except Exception as error:
        traceback.print_exc()
        words = " ".join(str(error).split())[:300]
        return Status.FAILED, f"{type(error).__name__}: {words}"
    return Status.PASSED, "; ".join(f"{name} {value}" for name, value in figures.items())
