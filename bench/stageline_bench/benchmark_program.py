"""Runs a benchmark's command line: an expected failure ends with one line, never with a traceback."""

import sys
from typing import Final

import click

from stageline_api.errors import UserError

INTERRUPTED: Final = 130


def run_benchmark(command: click.Command) -> None:
    """Run the command with the process's arguments; exit with its status if it fails or is interrupted."""
    try:
        command.main(prog_name="bench", standalone_mode=False)
    except UserError as error:
        click.echo(f"bench: {error.message}", err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("bench: interrupted", err=True)
        sys.exit(INTERRUPTED)
