"""`stageline stage`: the container entry point of one stage."""

import sys

import click

from stageline_runtime.contract import begin
from stageline_runtime.termination import RuntimeFailure, write_last_words


@click.command("stage")
def stage() -> None:
    """Run one stage of a group. Configured by the pod contract's environment alone."""
    try:
        contract = begin("stage")
    except RuntimeFailure as failure:
        sys.exit(write_last_words(failure.message(None)))
    if contract.ranks > 1:
        from stageline_runtime.stage.ranks.supervisor import RankSupervisor

        sys.exit(RankSupervisor(contract).run())
    # torch takes a second to import; a bad configuration is reported before that.
    from stageline_runtime.stage.process import StageProcess

    sys.exit(StageProcess(contract).run())
