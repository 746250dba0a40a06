"""Every shell command of the runbooks, the words that a reader fills in, and the few that no test can run.

A command is a line of a fenced `sh` block, or a span of code within a sentence of an alert's page that begins with a
program. Pure: it reads the pages and knows nothing of a cluster.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from boards.runbook_pages import FOLDER

PROGRAMS: Final = ("curl", "helm", "kubectl", "openssl", "stageline")
VARIABLES: Final = ("GROUP", "MODEL", "NAMESPACE", "POD", "STAGE_0_POD")
"""Shell variables that the first page has its reader set."""
FORWARDED: Final = ("127.0.0.1:8002", "127.0.0.1:8081")
"""Where a `port-forward` leads to stage 0 of a group and to a gateway."""
WORDS: Final = ("YOUR-GATEWAY", "DEVICES", "FILE", "NODE", "N")
"""What a reader writes over."""
_FENCE: Final = re.compile(r"^```sh\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_ANY_FENCE: Final = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_SPAN: Final = re.compile(rf"`((?:{'|'.join(PROGRAMS)})\s[^`]+)`")
_ASSIGNMENT: Final = re.compile(r"[A-Z_\d]+=\S+( +#.*)?$")
_QUOTED_OR_SAID: Final = re.compile(r"'[^']*'|#.*")
_CAPITALS: Final = re.compile(r"(?<![\w-])\$?[A-Z][A-Z\d_-]*(?![\w-])")
_CHANGES: Final = re.compile(
    r"^kubectl (-n \S+ )?(annotate|cordon|delete|drain|edit|label|patch|rollout|scale|uncordon)\b"
)
_LOOKS: Final = re.compile(r"^(curl|openssl|stageline|kubectl (-n \S+ )?(auth can-i|describe|get|logs|port-forward))\b")


@dataclass(frozen=True)
class Shape:
    """Commands that are alike, and what there is to say of them."""

    pattern: str
    reason: str

    def fits(self, command: str) -> bool:
        """Whether a command is one of them."""
        return re.search(self.pattern, command) is not None


NOT_RUN: Final = (
    Shape(r"^kubectl top ", "needs metrics-server, which a control plane does not bring"),
    Shape(r"^helm ", "tests have Helm as a library, not as a command; test_chart_install.py upgrades with it"),
)
GOES_ON: Final = (
    Shape(r" port-forward .* &$", "as long as the port is needed"),
    Shape(r"^stageline top (?!.*--once)", "until somebody has seen enough"),
)
"""Commands that show something and end when they are interrupted."""
PRINTS_NOTHING: Final = (Shape(r" --previous ", "no container has been started again, so there is no log of before"),)
"""Commands that rightly print nothing where all is well."""


def documented_commands() -> dict[str, list[str]]:
    """Pages by command, in order of pages and of lines; a command that several pages have is there once."""
    found: dict[str, list[str]] = {}
    for path in sorted(FOLDER.glob("*.md")):
        for command in commands_of(path):
            found.setdefault(command, []).append(path.stem)
    return found


def run_in_tests() -> list[str]:
    """All but those of `NOT_RUN`."""
    return [each for each in documented_commands() if not any(shape.fits(each) for shape in NOT_RUN)]


def changes(command: str) -> bool:
    """Whether a command leaves something different behind."""
    return _CHANGES.search(command) is not None


def only_looks(command: str) -> bool:
    """Whether a command leaves everything as it was, but for files in the directory where it is typed."""
    return _LOOKS.search(command) is not None


def goes_on(command: str) -> bool:
    """Whether it is one of `GOES_ON`."""
    return any(shape.fits(command) for shape in GOES_ON)


def may_print_nothing(command: str) -> bool:
    """Whether it is one of `PRINTS_NOTHING`."""
    return any(shape.fits(command) for shape in PRINTS_NOTHING)


def commands_of(page: Path) -> Iterator[str]:
    """All commands of one page."""
    text = page.read_text(encoding="utf-8")
    lines = [line for block in _FENCE.findall(text) for line in block.splitlines()]
    yield from (line for line in lines if not _ASSIGNMENT.match(line))
    if page.name != "README.md":  # where spans of code are names of commands
        yield from (" ".join(span.split()) for span in _SPAN.findall(_ANY_FENCE.sub("", text)))


def to_fill_in(command: str) -> set[str]:
    """Words in capitals outside quotes: variables as in `$POD`, and what a reader writes over."""
    return set(_CAPITALS.findall(_QUOTED_OR_SAID.sub("", command)))


def filled_in(command: str, words: Mapping[str, str]) -> str:
    """The command with each of `words` written over; variables are left to the shell."""
    for word, value in words.items():
        command = re.sub(rf"(?<![\w$-]){re.escape(word)}(?![\w-])", value, command)
    return command
