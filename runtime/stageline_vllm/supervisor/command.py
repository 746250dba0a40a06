"""`stageline vllm-stage`: the container entry point of a stage that vLLM runs, where Stageline is installed."""

import sys

import click

from stageline_vllm.supervisor.entry import run_stage


@click.command("vllm-stage")
def vllm_stage() -> None:
    """Run one vLLM node as a stage of a group. Configured by the pod contract's environment alone."""
    sys.exit(run_stage())
