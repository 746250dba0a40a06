"""How a benchmark that runs as `python -m …` ends: with one line for what a person can mend, never with a traceback."""

import sys
from typing import Final

import click

from stageline_api.errors import UserError

INTERRUPTED: Final = 130


def run_benchmark(command: click.Command) -> None:
    """Run the command of the process's arguments; end the process with its status when it fails or is interrupted."""
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
