"""One refused field, as data: where, which value, which rule. Rendered as one line."""

import json
from dataclasses import dataclass, replace
from typing import Any, Final

_LONGEST_VALUE: Final = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldProblem:
    """Why a field was refused. `path` is as in `spec.stages[1].layers`, empty for the document as a whole."""

    path: str
    rule: str
    """A clause that follows "is not allowed:" when there is a value, and the path alone when there is none."""
    value: str | None = None
    """The refused value as JSON, shortened; None when nothing was given or it must not be shown."""
    file: str = ""
    document: int | None = None
    """Counted from one; None when the file holds one document."""

    def placed(self, file: str, document: int | None) -> "FieldProblem":
        """The same problem, with the file and document it was found in."""
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
    """A value as one short line of JSON, so that `"2"` and `2` look different and nothing can break the line."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    # JSON escapes control characters below U+0020 only; a line separator or an escape code must not reach a terminal.
    text = "".join(character if character.isprintable() else f"\\u{ord(character):04x}" for character in text)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."
