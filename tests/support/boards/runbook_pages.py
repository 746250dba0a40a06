"""The runbooks as data: sections, commands, queries and the panels that they point at."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from processes.repository_files import ROOT

FOLDER: Final = ROOT / "docs" / "runbooks"
SECTIONS: Final = ("Meaning", "Impact", "Diagnosis", "Mitigation", "Capture")
_HEADING: Final = re.compile(r"^(#+) (.+)$", re.MULTILINE)
_CODE: Final = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_INLINE: Final = re.compile(r"`([^`]+)`")
_PANELS: Final = re.compile(r"[Bb]oard \*\*(\w+)\*\*, panels? ((?:\*[^*]+\*(?:, (?:and )?| and )?)+)")
_STAGELINE: Final = re.compile(r"(?:^|[|&;] *)stageline ((?:[^|&;\n])+)", re.MULTILINE)


@dataclass(frozen=True)
class Runbook:
    """One page."""

    path: Path

    @property
    def text(self) -> str:
        """As written."""
        return self.path.read_text(encoding="utf-8")

    @property
    def anchors(self) -> set[str]:
        """What a link may lead to within the page, as code hosts name headings."""
        outside = _CODE.sub("", self.text)
        return {re.sub(r"[^\w -]", "", name.lower()).replace(" ", "-") for _, name in _HEADING.findall(outside)}

    @property
    def sections(self) -> dict[str, str]:
        """Text by heading of the second level, in order."""
        parts = re.split(r"^## (.+)$", self.text, flags=re.MULTILINE)
        return {name: text.strip() for name, text in zip(parts[1::2], parts[2::2], strict=True)}

    def code(self, language: str) -> list[str]:
        """Fenced blocks."""
        return [block for name, block in _CODE.findall(self.text) if name == language]

    @property
    def stageline_commands(self) -> list[list[str]]:
        """Each in words, without the program's name; those within a sentence too."""
        places = [*self.code("sh"), *_INLINE.findall(_CODE.sub("", self.text))]
        return [found.split() for place in places for found in _STAGELINE.findall(place)]

    @property
    def panels(self) -> list[tuple[str, str]]:
        """(board, panel) of each panel that the page sends its reader to."""
        text = " ".join(self.text.split())
        found = _PANELS.findall(text)
        return [(board.lower(), panel) for board, names in found for panel in re.findall(r"\*([^*]+)\*", names)]

    def spoken_of(self, *roots: str) -> set[str]:
        """Dotted names in code that begin with one of `roots`, such as fields of a spec."""
        outside = _CODE.sub("", self.text)
        names = re.compile(rf"(?:{'|'.join(map(re.escape, roots))})\.[A-Za-z][\w.]*")
        return {name for code in _INLINE.findall(outside) for name in names.findall(code)}


def runbooks() -> dict[str, Runbook]:
    """By alert."""
    return {path.stem: Runbook(path) for path in sorted(FOLDER.glob("*.md")) if path.name != "README.md"}
