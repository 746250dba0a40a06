"""`stageline engine`: the container entry point of a group's engine."""

import asyncio
import logging
import sys

import click

from stageline_runtime.contract import read_contract
from stageline_runtime.termination import RuntimeFailure, write_last_words


@click.command("engine")
def engine() -> None:
    """Run the engine of one group. Configured by the pod contract's environment alone."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        contract = read_contract()
    except RuntimeFailure as failure:
        sys.exit(write_last_words(failure.message(None)))
    from stageline_runtime.engine.process import EngineProcess

    sys.exit(asyncio.run(EngineProcess(contract).run()))
