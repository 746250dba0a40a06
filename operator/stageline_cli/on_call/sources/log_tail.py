"""The end of a log, in whole lines: half a line could show half a secret, which no pattern finds."""

from pathlib import Path
from typing import Final

from stageline_cli.on_call.sources.source import Piece

MAX_LOG_BYTES: Final = 2 * 2**20
"""Of each log. What matters of a failure stands at its end."""


def tail_of(path: Path, name: str) -> Piece:
    """The end of a file as a piece called `name`."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - MAX_LOG_BYTES))
            return Piece(name, whole_lines(file.read(), is_cut=size > MAX_LOG_BYTES))
    except OSError as error:
        return Piece(name, missing=f"{path}: {error.strerror}")


def whole_lines(content: bytes, is_cut: bool) -> str:
    """Text without the first line when that may be the end of a longer one."""
    text = content.decode("utf-8", errors="replace")
    if not is_cut:
        return text
    _, newline, rest = text.partition("\n")
    return f"[only the last {len(content)} bytes]\n{rest}" if newline else "[one line, too long to be shown]\n"
