"""The table of values in the chart's README, made from the comments of its values.yaml.

`python -m cluster.chart_values_table`, with tests/support on the path, writes it; a test compares the two.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from processes.repository_files import ROOT

CHART: Final = ROOT / "charts" / "stageline"
README: Final = CHART / "README.md"
BEGIN: Final = "<!-- values: begin -->"
END: Final = "<!-- values: end -->"
_KEY: Final = re.compile(r"( *)([A-Za-z]+):(.*)")


def described_values(values_file: Path = CHART / "values.yaml") -> Iterator[tuple[str, str]]:
    """(path, description) of each value whose comment begins with `# --`, in order."""
    path: list[str] = []
    description: list[str] = []
    for line in values_file.read_text(encoding="utf-8").splitlines():
        comment = line.strip()
        if comment.startswith("# -- "):
            description = [comment.removeprefix("# -- ")]
        elif comment.startswith("# ") and description:
            description.append(comment.removeprefix("# "))
        elif key := _KEY.fullmatch(line):
            path = [*path[: len(key[1]) // 2], key[2]]
            if description:
                yield ".".join(path), " ".join(description)
                description = []


def default_of(path: str, values: dict[str, Any]) -> Any:
    """The value at a dotted path."""
    found: Any = values
    for name in path.split("."):
        found = found[name]
    return found


def values_table() -> str:
    """Markdown."""
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    rows = [
        f"| `{path}` | `{json.dumps(default_of(path, values))}` | {description} |"
        for path, description in described_values()
    ]
    return "\n".join(["| Value | Default | What it does |", "| --- | --- | --- |", *rows]) + "\n"


def readme_with_table(text: str) -> str:
    """The README with the table as it should be."""
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n{values_table()}{END}{after}"


if __name__ == "__main__":
    README.write_text(readme_with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
