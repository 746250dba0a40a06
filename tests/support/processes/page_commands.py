"""The shell commands of the pages that a newcomer follows, and which test runs each of them.

Pure: it reads pages and runs nothing. Every command belongs to exactly one `Place`; a command that fits none, or two,
fails `tests/repository/test_page_commands.py`, so that no command can be added to a page without being run.
"""

import re
import shlex
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any, Final

from processes.repository_files import ROOT

PAGES: Final = ("README.md", "docs/quickstart-local.md", "docs/quickstart-cluster.md", "docs/quickstart-gpu.md")
REGISTRY: Final = "registry.example.com/team"
"""What a reader replaces with their own."""


class Place(Enum):
    """Where a command is run."""

    CI = "`.ci/run` and tests/repository/test_setup.py"
    LOCAL = "tests/main_job/test_quickstart_local.py"
    CLUSTER = "tests/cluster/test_quickstart_commands.py"
    REAL_NODES = "tests/node, by `make test-node`"
    NOWHERE = "no test can run it"


@dataclass(frozen=True)
class Shape:
    """Commands that are alike: where they run, and why there."""

    pattern: str
    place: Place
    reason: str


SHAPES: Final = (
    Shape(r"^make (up|test|check|help)$", Place.CI, "takes the checkout as a whole"),
    Shape(r"^(REGISTRY=\S+ PUSH=1 )?make images$", Place.REAL_NODES, "builds the images, which takes root here"),
    Shape(r"^\.venv/bin/stageline (validate|plan|up|status|down) ", Place.LOCAL, "needs no cluster"),
    Shape(
        r"^curl http://127\.0\.0\.1:8080/\S+ .*\"smollm2\"", Place.CLUSTER, "main_job runs the README's on one machine"
    ),
    Shape(r"^helm (install|upgrade|uninstall) ", Place.CLUSTER, "Helm as a library"),
    Shape(r"^kubectl (apply|wait|delete) .*(examples/smollm2\.yaml|plm/smollm2)", Place.CLUSTER, "kubectl itself"),
    Shape(r"^kubectl port-forward .*svc/stageline-gateway", Place.CLUSTER, "kubectl itself"),
    Shape(r"^kubectl apply .* examples/gpu/", Place.CLUSTER, "up to the pods and claims that the operator creates"),
    Shape(r"^kubectl wait .* plm/qwen3-8b ", Place.NOWHERE, "needs a cluster with a GPU"),
    Shape(r"^curl http://127\.0\.0\.1:8080/\S+ .*\"qwen3-8b\"", Place.NOWHERE, "needs a cluster with a GPU"),
    Shape(r"^kind ", Place.NOWHERE, "needs docker"),
    Shape(r"^\.venv/bin/stageline prepare ", Place.REAL_NODES, "the model of that test is prepared by this code"),
    Shape(
        r"^sed -i\.bak .* examples/air_gapped/claim\.yaml$", Place.REAL_NODES, "its registry is replaced by the test's"
    ),
    Shape(r"^kubectl \S+ .*(claim\.yaml|pod/models|models/HASH)", Place.REAL_NODES, "`kubectl cp` needs a container"),
    Shape(r"^kubectl apply .* examples/air_gapped/smollm2\.yaml$", Place.REAL_NODES, "needs the claim before it"),
)


def blocks(page: str, language: str) -> list[str]:
    """The page's fenced blocks of one language."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^ *```{language}\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)


def commands(page: str) -> list[str]:
    """Each command of the page's `sh` blocks, in order; a quoted text may span lines."""
    found, begun = [], ""
    for line in "".join(blocks(page, "sh")).splitlines():
        begun = f"{begun}\n{line}" if begun else line
        if begun.strip() and _is_whole(begun):
            found.append(begun.strip())
            begun = ""
    assert not begun.strip(), f"{page}: unfinished command {begun!r}"
    return found


def _is_whole(text: str) -> bool:
    try:
        return bool(shlex.split(text)) and not text.endswith("\\")
    except ValueError:  # a quotation that goes on
        return False


def places_of(command: str) -> list[Place]:
    """Where a command runs: one place, if the tables above are right."""
    line = " ".join(command.split())
    return list(dict.fromkeys(shape.place for shape in SHAPES if re.search(shape.pattern, line)))


def commands_at(place: Place, page: str) -> list[str]:
    """The page's commands that a place has to run."""
    return [command for command in commands(page) if place in places_of(command)]


def values_set(words: list[str]) -> dict[str, Any]:
    """What a `helm` command's `--set` options give, as nested values."""
    values: dict[str, Any] = {}
    for option, given in pairwise(words):
        if option != "--set":
            continue
        path, _, text = given.partition("=")
        *parents, last = path.split(".")
        inner = values
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = {"true": True, "false": False}.get(text, text)
    return values
