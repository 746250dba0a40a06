"""Every `stageline` command that a page tells somebody on call to type is one that the command line takes."""

import re
import shlex

import click
import pytest

from processes.repository_files import ROOT
from stageline_cli.main import cli

COMMANDS = ("status", "top", "debug-bundle")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINE = re.compile(rf"stageline ((?:{'|'.join(COMMANDS)}) [^\n`|>#]*)")


def documented() -> list[str]:
    found = {each.strip() for page in PAGES for each in LINE.findall(page.read_text(encoding="utf-8"))}
    return sorted(each for each in found if "[" not in each and re.match(r"\S+ (-|\$|smollm2)", each))


def test_there_are_such_commands() -> None:
    assert {each.split()[0] for each in documented()} == set(COMMANDS)


@pytest.mark.parametrize("line", documented())
def test_a_documented_command_is_taken(line: str) -> None:
    name, *words = shlex.split(line.replace("$GROUP", "1"))
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    command.make_context(name, words)
