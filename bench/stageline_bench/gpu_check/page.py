"""The outcomes as the table of docs/gpu.md."""

from collections.abc import Sequence

from stageline_bench.gpu_check.sections import Outcome


def render(outcomes: Sequence[Outcome], header: str) -> str:
    """A line of where and when, then a row for each part."""
    lines = [header, "", "| Part | What it shows | Result | Figures |", "|---|---|---|---|"]
    lines += [
        f"| {outcome.name} | {outcome.shows} | {outcome.status} | {_cell(outcome.detail)} |" for outcome in outcomes
    ]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
