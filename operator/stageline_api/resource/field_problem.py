"""One refused field as data: its path, value and rule. Rendered as one line."""

import json
from dataclasses import dataclass, replace
from typing import Any, Final

_LONGEST_VALUE: Final = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldProblem:
    """Why a field was refused. `path` is like `spec.stages[1].layers`, empty for the document as a whole."""

    path: str
    rule: str
    """A clause that follows "is not allowed:" if there is a value, otherwise the path alone."""
    value: str | None = None
    """The refused value as shortened JSON; None if there is none or it must not be shown."""
    file: str = ""
    document: int | None = None
    """Number of the document, from one; None if the file has one document."""

    def placed(self, file: str, document: int | None) -> "FieldProblem":
        """The same problem, with its file and document."""
        return replace(self, file=file, document=document)

    def __str__(self) -> str:
        """One line: `smollm2.yaml: spec.parallelism.pipeline: 0 is not allowed: must be at least 1`."""
        where = [self.file] if self.file else []
        if self.document is not None:
            where.append(f"document {self.document}")
        if self.path:
            where.append(self.path)
        rule = self.rule if self.value is None else f"{self.value} is not allowed: {self.rule}"
        return ": ".join([*where, rule])


def show_value(value: Any) -> str:
    """A value as one short line of JSON, so that `"2"` and `2` differ and no control character is printed."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    # JSON escapes only control characters below U+0020; line separators and escape codes must not reach a terminal.
    text = "".join(character if character.isprintable() else f"\\u{ord(character):04x}" for character in text)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."
