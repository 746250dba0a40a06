"""Runs the parts of the check in turn and shows their outcomes as the table of docs/gpu.md.

Each part ends passed, failed or skipped with a reason, and none stops the rest.
"""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

Figures = dict[str, str]
"""What a part found out, by name, as it is printed."""


class Status(StrEnum):
    """How a part ended; `UNPROVEN` is one that no GPU has run."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    UNPROVEN = "unproven"


class SkipSectionError(Exception):
    """This machine can't run the part; the message says what it lacks."""


class CheckFailedError(Exception):
    """The part ran and what it found is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One part of the check."""

    name: str
    shows: str
    """What its passing proves, as the page says it."""
    run: Callable[[], Figures]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one part ended."""

    name: str
    shows: str
    status: Status
    detail: str
    """The figures, or why it failed or was skipped."""


def run_sections(sections: Sequence[Section], say: Callable[[str], None]) -> list[Outcome]:
    """Every part's outcome, in order; `say` is told each as it comes."""
    outcomes = []
    for section in sections:
        say(f"{section.name} …")
        status, detail = _run(section)
        say(f"{section.name}: {status}: {detail}")
        outcomes.append(Outcome(name=section.name, shows=section.shows, status=status, detail=detail))
    return outcomes


def unproven(sections: Sequence[Section]) -> list[Outcome]:
    """What may be said of parts that no GPU has run."""
    return [
        Outcome(name=section.name, shows=section.shows, status=Status.UNPROVEN, detail="no GPU has run this yet")
        for section in sections
    ]


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """1 when a part failed."""
    return int(any(outcome.status is Status.FAILED for outcome in outcomes))


def render(outcomes: Sequence[Outcome], header: str) -> str:
    """Markdown: a line of where and when, then a row for each part."""
    lines = [header, "", "| Part | What it shows | Result | Figures |", "|---|---|---|---|"]
    lines += [
        f"| {outcome.name} | {outcome.shows} | {outcome.status} | {_cell(outcome.detail)} |" for outcome in outcomes
    ]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _run(section: Section) -> tuple[Status, str]:
    try:
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
