"""`make soak`: a real pipeline for an hour under mixed traffic while its processes are killed and stopped.

Afterwards come a thousand bodies made to hold others up, the fuzzing tests with many times their usual examples and,
where Go is, 500 models on a real control plane. Ends with a report, and with 1 when anything was wrong, 130 when it
was interrupted. What it wrote is removed unless something was wrong.
"""

import argparse
import asyncio
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final

from chaos import soak_commands
from chaos.soak_pipeline import PATIENCE_SECONDS, PipelineSoak, serving_soaked, soak
from chaos.soak_report import failures_of, report_lines
from hostility.soak_hostile import HostileSoak, serving_hostile, soak_hostile, too_large
from hostility.soak_hostile import report_lines as hostile_lines

PARTS: Final = ("pipeline", "hostile", "fuzz", "operator")
INTERRUPTED: Final = 130
_HOLD: Final = "STAGELINE_GATEWAY_HOLD_SECONDS"


def say(line: str) -> None:
    """To whoever looks on, with the time."""
    sys.stdout.write(f"{time.strftime('%H:%M:%S', time.gmtime())} {line}\n")
    sys.stdout.flush()


def arguments_of(words: list[str]) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--minutes", type=_minutes, default=60.0, help="how long the pipeline is asked; default 60")
    parser.add_argument(
        "--seed", type=int, default=random.randrange(10**6), help="of requests and blows; drawn if left out"
    )
    parser.add_argument("--clients", type=int, default=8, help="how many ask at once; default 8")
    parser.add_argument("--only", choices=PARTS, action="append", help="a part to run; all if left out")
    parser.add_argument(
        "--fuzz-factor", type=int, help="how many times the usual examples; one per 6 minutes if left out"
    )
    parser.add_argument("--bodies", type=int, default=1000, help="of the hostile part; default 1000")
    parser.add_argument("--models", type=int, default=500, help="of the operator's part; default 500")
    return parser.parse_args(words)


def _minutes(text: str) -> float:
    minutes = float(text)
    if not 0 < minutes < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of minutes")
    return minutes


def soak_pipeline(given: argparse.Namespace, directory: Path, requests_of_each: int = 6) -> PipelineSoak:
    """Run the pipeline's part; an interruption leaves what there is in the report and is raised again."""
    state = PipelineSoak(given.seed, given.minutes)
    os.environ[_HOLD] = str(PATIENCE_SECONDS)
    try:
        with serving_soaked(directory) as (served, model):
            asyncio.run(soak(served, model, state, say, given.clients, requests_of_each))
    except Exception as error:
        # The report comes whatever went wrong, and this is part of it.
        state.failures.append("".join(traceback.format_exception(error)))
    finally:
        for line in report_lines(state):
            say(line)
    return state


def soak_others(given: argparse.Namespace, directory: Path) -> HostileSoak:
    """Run the hostile part; its report comes whatever went wrong."""
    state = HostileSoak(given.seed, given.bodies)
    directory.mkdir()
    try:
        with serving_hostile(directory) as served:
            soak_hostile(served.url, state, say, lambda: too_large(served.process.pid))
    except Exception as error:
        state.failures.append("".join(traceback.format_exception(error)))
    finally:
        for line in hostile_lines(state):
            say(line)
    return state


def run_parts(given: argparse.Namespace, directory: Path) -> bool:
    """Whether all parts that were asked for went well."""
    wanted = given.only or PARTS
    factor = given.fuzz_factor or max(1, round(given.minutes / 6))
    others: dict[str, Callable[[], soak_commands.Outcome]] = {
        "fuzz": lambda: soak_commands.fuzz(factor, given.seed, directory),
        "operator": lambda: soak_commands.operator(given.models, directory),
    }
    is_well = True
    if "pipeline" in wanted:
        is_well = not failures_of(soak_pipeline(given, directory))
    if "hostile" in wanted:
        is_well = not soak_others(given, directory / "hostile").failures and is_well
    outcomes = [run() for part, run in others.items() if part in wanted]
    for outcome in outcomes:
        say(outcome.line)
    return is_well and not any(outcome.is_failure for outcome in outcomes)


def hear_signals() -> None:
    """SIGTERM ends a soak as Ctrl-C does, which a start in the background must not have switched off."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))


def main() -> int:
    """Returns the exit status."""
    given = arguments_of(sys.argv[1:])
    hear_signals()
    directory = Path(tempfile.mkdtemp(prefix="soak-"))
    say(f"seed {given.seed}; logs in {directory}")
    is_well = False
    try:
        is_well = run_parts(given, directory)
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
    finally:
        if is_well:
            shutil.rmtree(directory)
    say("all went well" if is_well else f"something was wrong; logs in {directory}")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
