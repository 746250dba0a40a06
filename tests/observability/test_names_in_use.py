"""Names of metrics in documents, examples, the chart and the commands are names that something exports.

Boards and rules have checks of their own, which parse their queries.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from boards.exported_names import exported_labels, exported_names
from boards.metrics_page import METRICS
from processes.repository_files import ROOT, repository_files

PLACES: Final = ("docs", "examples", "charts", "README.md", "operator/stageline_local", "operator/stageline_cli")
NAME: Final = re.compile(r"(?<![\w:./])stageline_[a-z0-9]+(?:_[a-z0-9]+)+\b(?![:/.(]|\s*=)")
PACKAGES: Final = frozenset(path.parent.name for path in ROOT.glob("*/stageline_*/__init__.py"))
SCRAPE_LABELS: Final = frozenset({"job", "instance", "namespace", "model", "group", "pod", "container", "endpoint"})

HONORED: Final[Mapping[str, frozenset[str]]] = {
    "stage": frozenset(),
    "engine": frozenset(),
    "gateway": frozenset({"namespace"}),
    "operator": frozenset({"namespace", "model", "group"}),
}
"""Labels of each component's own that its scrape honors."""


def used_names(file: Path) -> set[str]:
    return set(NAME.findall(file.read_text(encoding="utf-8"))) - PACKAGES


def test_every_name_that_is_written_down_is_exported(exported_pages: Mapping[str, str]) -> None:
    known = exported_names(exported_pages) | {spec.name for specs in METRICS.values() for spec in specs}
    files = [path for path in repository_files() if str(path.relative_to(ROOT)).startswith(PLACES)]
    used = {name: file for file in files if file.suffix in (".md", ".py", ".yaml", ".tpl") for name in used_names(file)}
    assert len(used) > 60, "the search finds next to nothing"
    assert {name: str(file) for name, file in used.items() if name not in known} == {}


def test_no_label_of_an_exporter_clashes_with_one_that_its_scrape_adds(exported_pages: Mapping[str, str]) -> None:
    """A clash would rename the exporter's label to exported_…, and every query of it would find nothing."""
    for component, honored in HONORED.items():
        for name, labels in exported_labels({component: exported_pages[component]}).items():
            assert labels & SCRAPE_LABELS <= honored, name
