"""Things that rich can print, as plain text."""

import io
from collections.abc import Iterable

from rich.console import Console, RenderableType

PAGE_WIDTH = 200


def text_page(parts: Iterable[RenderableType]) -> str:
    """One line after the other, without colours."""
    console = Console(file=io.StringIO(), width=PAGE_WIDTH, highlight=False, color_system=None)
    for part in parts:
        console.print(part)
    written = console.file
    assert isinstance(written, io.StringIO)
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines()) + "\n"
