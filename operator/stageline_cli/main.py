"""Entry point of `stageline`: the table of subcommands, and the output of failures."""

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Final

import click

from stageline_api.errors import UserError
from stageline_api.version import stageline_version
from stageline_cli.lazy_group import LazyCommand, LazyGroup

DEBUG_ENV: Final = "STAGELINE_DEBUG"
"""Set to 1 to print the traceback of an unexpected failure."""

_INTERRUPTED: Final = 130
"""128 + SIGINT, as shells report it."""

COMMANDS: Final = {
    "up": LazyCommand(
        target="stageline_cli.up.command:up",
        help="Serve a PipelineModel on this machine, each stage a process.",
        extra="runtime,prepare,gateway",
    ),
    "down": LazyCommand(target="stageline_cli.up.down:down", help="Stop what `up --detach` started."),
    "status": LazyCommand(
        target="stageline_cli.status:status",
        help="Show the state of models, groups and stages, and the reasons.",
        extra="cluster",
    ),
    "top": LazyCommand(
        target="stageline_cli.top:top", help="Watch the activity of every stage, and users' latencies.", extra="cluster"
    ),
    "debug-bundle": LazyCommand(
        target="stageline_cli.debug_bundle:debug_bundle",
        help="Pack everything about a model, without its secrets.",
        extra="cluster",
    ),
    "restart": LazyCommand(
        target="stageline_cli.rollout_commands:restart",
        help="Replace a model's groups one after another.",
        extra="cluster",
    ),
    "rollback": LazyCommand(
        target="stageline_cli.rollout_commands:rollback",
        help="Undo a rollout that has not ended.",
        extra="cluster",
    ),
    "drain": LazyCommand(
        target="stageline_cli.drain_command:drain",
        help="Move every stage off a node, group by group.",
        extra="cluster",
    ),
    "trace": LazyCommand(target="stageline_cli.trace:trace", help="Write a timeline of a running group, for Perfetto."),
    "validate": LazyCommand(
        target="stageline_cli.validate:validate", help="Check PipelineModel files; exit status 2 when one is refused."
    ),
    "plan": LazyCommand(
        target="stageline_cli.plan:plan",
        help="Show a model's cut, whether it fits, and its predicted speed.",
        extra="runtime",
    ),
    "bench": LazyCommand(
        target="stageline_bench.runtime.command:bench",
        help="Measure the runtime on this machine.",
        extra="runtime,prepare",
    ),
    "crd": LazyCommand(target="stageline_cli.crd_command:crd", help="Print the CustomResourceDefinition."),
    "prepare": LazyCommand(
        target="stageline_runtime.prepare.command:prepare",
        help="Fill the model cache (init container of a stage pod).",
        extra="prepare",
    ),
    "vllm-stage": LazyCommand(
        target="stageline_vllm.supervisor.command:vllm_stage",
        help="Run one node of vLLM as a stage (container entry point).",
        extra="runtime",
    ),
    "vllm-files": LazyCommand(
        target="stageline_vllm.supervisor.files_command:vllm_files",
        help="Copy Stageline's part of vLLM's image (init container).",
        extra="runtime",
    ),
    "engine": LazyCommand(
        target="stageline_cli.engine_command:engine",
        help="Schedule one group's requests (container of stage 0's pod).",
        extra="runtime",
    ),
    "stage": LazyCommand(
        target="stageline_runtime.stage.command:stage",
        help="Run one stage's layers (container of every stage pod).",
        extra="runtime",
    ),
    "gateway": LazyCommand(
        target="stageline_gateway.command:gateway",
        help="Serve the OpenAI API for the groups.",
        extra="gateway",
    ),
    "operator": LazyCommand(
        target="stageline_operator.controller.command:operator",
        help="Reconcile the PipelineModels of a cluster.",
        extra="operator",
    ),
}

cli = LazyGroup(
    name="stageline",
    commands_table=COMMANDS,
    help="Serve a large language model as a pipeline of stages.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    params=[
        click.Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            help="Print the version and exit.",
            callback=lambda ctx, _option, given: _print_version(ctx) if given else None,
        )
    ],
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line (`sys.argv` by default) and exit with its status."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None, group: LazyGroup | None = None) -> int:
    """Run the command line, `stageline` or another `group` of commands, and return its exit status.

    A traceback is printed only with STAGELINE_DEBUG=1.
    """
    chosen = group or cli
    try:
        outcome = chosen.main(args=arguments, prog_name=chosen.name, standalone_mode=False)
    except UserError as error:
        return _say(error.message, error.exit_code)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return _say("interrupted", _INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output has closed it, as with `| head`; otherwise Python would fail again when it flushes at
        # exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if os.environ.get(DEBUG_ENV) == "1":
            traceback.print_exc()
            return 1
        shown = " ".join(f"{type(error).__name__}: {error}".split())
        return _say(f"{shown} (unexpected; run with {DEBUG_ENV}=1 for the traceback)", 1)
    return outcome if isinstance(outcome, int) else 0


def _say(message: str, exit_code: int) -> int:
    print(f"stageline: {message}", file=sys.stderr)
    return exit_code


def _print_version(ctx: click.Context) -> None:
    click.echo(f"stageline {stageline_version()}")
    ctx.exit()


if __name__ == "__main__":
    main()
