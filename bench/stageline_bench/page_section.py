"""Writes a program's tables into a Markdown page between its markers; the text around them stays.

The page is always optional: an installed package has no docs, so there is no default page, and a missing one is
reported.
"""

import platform
from pathlib import Path
from typing import Final

import click

from stageline_api.errors import UserError

EXISTING_PAGE: Final = click.Path(exists=True, dir_okay=False, path_type=Path)
"""Type of an option `--page`: a missing page is refused before the measurement."""


def markers(program: str) -> tuple[str, str]:
    """The lines that enclose the section of `program` in a page."""
    return f"<!-- begin {program} -->\n", f"<!-- end {program} -->"


def replace_section(page: Path, program: str, content: str) -> None:
    """Put `content`, which ends with a newline, between the markers of `program`.

    Raises:
        UserError: the page can't be read or written, or has no such section.
    """
    begin, end = markers(program)
    try:
        before, found, rest = page.read_text(encoding="utf-8").partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise UserError(f"{page} has no section {begin.strip()} … {end}")
        page.write_text(before + begin + content + end + after, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--page {page}: {error.strerror}") from error


def cpu_name() -> str:
    """The CPU's model as Linux names it, without which figures mean nothing."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return " ".join(line.partition(":")[2].split())
    return platform.processor() or platform.machine()
