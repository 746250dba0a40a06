"""Writes the outcomes into docs/gpu.md, between markers; the prose around stays a person's."""

from collections.abc import Sequence
from pathlib import Path

from stageline_api.errors import UserError
from stageline_bench.gpu_check.sections import Outcome

BEGIN, END = "<!-- begin gpu-check -->\n", "<!-- end gpu-check -->"


def render(outcomes: Sequence[Outcome], header: str) -> str:
    """A line of where and when, then a row for each part."""
    lines = [header, "", "| Part | What it shows | Result | Figures |", "|---|---|---|---|"]
    lines += [
        f"| {outcome.name} | {outcome.shows} | {outcome.status} | {_cell(outcome.detail)} |" for outcome in outcomes
    ]
    return "\n".join(lines) + "\n"


def update_page(page: Path, table: str) -> None:
    """Replace what is between the markers.

    Raises:
        UserError: the page has no such section.
    """
    text = page.read_text(encoding="utf-8")
    before, found, rest = text.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not found or not closed:
        raise UserError(f"{page} has no section {BEGIN.strip()} … {END}")
    page.write_text(before + BEGIN + table + END + after, encoding="utf-8")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
