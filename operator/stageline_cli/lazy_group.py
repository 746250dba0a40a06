"""A click group with a table of subcommands: name, module, help, required extra.

Help is printed from the table alone. A subcommand with a missing dependency names the extra to install.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click

from stageline_api.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class LazyCommand:
    target: str
    """`module:attribute` of a `click.Command`."""
    help: str
    extra: str | None = None
    """Extra of the distribution `stageline` that the command needs; None if it needs none."""


class LazyGroup(click.Group):
    """Looks subcommands up in a table and imports one when it runs."""

    def __init__(self, *args: Any, commands_table: Mapping[str, LazyCommand], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._table = dict(commands_table)

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one subcommand; None if the table has no such name."""
        del ctx
        row = self._table.get(cmd_name)
        return None if row is None else self._load(cmd_name, row)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of subcommands without importing any."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, row.help) for name, row in self._table.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run, and name the extra if a command finds a missing dependency only later."""
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            name = ctx.invoked_subcommand
            if name is None or name not in self._table:
                raise
            raise _missing_dependency(name, self._table[name], error) from error

    def _load(self, name: str, row: LazyCommand) -> click.Command:
        module_name, _, attribute = row.target.partition(":")
        try:
            loaded = getattr(importlib.import_module(module_name), attribute)
        except ModuleNotFoundError as error:
            raise _missing_dependency(name, row, error) from error
        if not isinstance(loaded, click.Command):
            raise TypeError(f"{row.target} is a {type(loaded).__name__}, not a click command")
        return loaded


def _missing_dependency(name: str, row: LazyCommand, error: ModuleNotFoundError) -> Exception:
    """A sentence for a missing dependency; the error itself if one of our own modules is missing."""
    missing = (error.name or "").partition(".")[0]
    if not missing or missing.startswith("stageline_") or row.extra is None:
        return error
    return UserError(f"{name} needs {missing}, which is not installed: pip install 'stageline[{row.extra}]'")
