"""docs/cli.md lists the commands and flags that there are."""

import click

from cluster.commands_page import PAGE, UNLISTED, page
from stageline_cli.main import cli


def test_the_page_is_what_the_commands_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run make generate"


def test_the_page_has_every_flag_of_the_gateway_with_its_variable() -> None:
    text = PAGE.read_text(encoding="utf-8")
    command = cli.get_command(click.Context(cli), "gateway")
    assert command is not None
    assert [each for option in command.params for each in option.opts if f"`{each}`" not in text] == []
    assert "`30.0` `$STAGELINE_GATEWAY_HOLD_SECONDS`" in text


def test_only_commands_that_exist_are_left_out() -> None:
    assert set(cli.list_commands(click.Context(cli))) >= UNLISTED
