"""Checks of links between stages: plans sent over NCCL, and peers that are killed or stopped."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stageline_bench.gpu_check.link_end import Carried, Loss
from stageline_bench.gpu_check.sections import CheckFailedError, Figures

PLANS = 1000
FEW_PLANS = 20
"""Plans before a peer is lost."""
MOST_SECONDS = 120.0
"""Time limit of one pair."""
EXIT_SECONDS = 15.0
"""Time limit for the exit of an end with a lost peer."""
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
END = [sys.executable, "-m", "stageline_bench.gpu_check.link_end"]


class LinkParts:
    """Pairs of processes on the first device, which NCCL treats as two nodes (`shared_card`)."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def links(self) -> Figures:
        """1,000 plans of random sizes in random orders over two links: each byte as sent."""
        with self._pair("links", PLANS) as ends:
            found = [Carried(**_line(end)) for end in ends]
            for end in ends:
                end.wait(MOST_SECONDS)
        wrong = {stage: carried.wrong for stage, carried in enumerate(found) if carried.wrong}
        if wrong:
            raise CheckFailedError(f"tensors that differ from what was sent, by the stage that received them: {wrong}")
        seconds = max(carried.seconds for carried in found)
        return {"plans": f"{PLANS}, every byte as sent", "seconds": f"{seconds:.1f}"}

    def lost_peers(self) -> Figures:
        """A killed and a stopped peer, with torch's error handling off and on: time to detection, and the exit."""
        cases = [(handling, how) for handling in ("0", "2") for how in SIGNALS]
        with ThreadPoolExecutor(len(cases)) as pool:
            figures = list(pool.map(lambda case: self._lost_peer(*case), cases))
        found = {f"{how}, handling {handling}": said for (handling, how), (said, _) in zip(cases, figures, strict=True)}
        wrong = [name for name, (_, is_right) in zip(found, figures, strict=True) if not is_right]
        if wrong:
            raise CheckFailedError(f"a lost peer is not reported or the exit hangs ({', '.join(wrong)}): {found}")
        return found

    def _lost_peer(self, handling: str, how: str) -> tuple[str, bool]:
        options = ("--lose-peer",)
        with self._pair(f"lost-{how}-{handling}", FEW_PLANS, *options, environment={HANDLING: handling}) as ends:
            lost, survivor = ends
            for end in ends:
                _line(end)
            time.sleep(0.5)  # the receive is on the device by then; no comparison depends on it
            lost.send_signal(SIGNALS[how])
            at = time.monotonic()
            loss = Loss(**_line(survivor))
            left = _seconds_to_end(survivor, loss.exiting_at)
        known = "never" if loss.reported_at is None else f"after {loss.reported_at - at:.2f} s"
        past = (
            "stays in the receive" if loss.past_at is None else f"is past the receive after {loss.past_at - at:.2f} s"
        )
        error = loss.error.partition(";")[0]
        ended = f"takes more than {EXIT_SECONDS:g} s" if left is None else f"takes {left:.2f} s"
        is_right = loss.reported_at is not None and left is not None
        return f"known {known} ({error}), the device {past}, exit {ended}", is_right

    @contextmanager
    def _pair(
        self, name: str, plans: int, *options: str, environment: dict[str, str] | None = None
    ) -> Iterator[tuple["subprocess.Popen[str]", "subprocess.Popen[str]"]]:
        """Both ends of two links, ended on exit; their standard error is kept beside the store."""
        store = self._directory / f"{name}.store"
        arguments = [str(store), "11", str(plans), *options]
        environment = {**os.environ, **(environment or {})}
        ends = [_start(stage, arguments, environment, self._directory / f"{name}-{stage}.log") for stage in (0, 1)]
        overdue = threading.Timer(MOST_SECONDS, _kill, args=(ends,))
        overdue.start()
        try:
            yield ends[0], ends[1]
        except EOFError as error:
            words = [self._last_line(name, stage) for stage in (0, 1)]
            raise CheckFailedError(f"{name}: an end ended early: {words}") from error
        finally:
            overdue.cancel()
            _kill(ends)
            for end in ends:
                end.communicate()

    def _last_line(self, name: str, stage: int) -> str:
        return "".join((self._directory / f"{name}-{stage}.log").read_text().strip().splitlines()[-1:])


def _start(stage: int, arguments: list[str], environment: dict[str, str], log: Path) -> "subprocess.Popen[str]":
    with log.open("w") as errors:
        return subprocess.Popen(
            [*END, str(stage), *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            stdin=subprocess.DEVNULL,
            text=True,
        )


def _seconds_to_end(end: "subprocess.Popen[str]", since: float) -> float | None:
    """How long its exit took; None if it exceeded the limit."""
    try:
        end.wait(EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        return None
    return time.monotonic() - since


def _kill(ends: list["subprocess.Popen[str]"]) -> None:
    for end in ends:
        end.kill()


def _line(end: "subprocess.Popen[str]") -> dict[str, Any]:
    """The next line of an end; raises EOFError if it has ended instead."""
    assert end.stdout is not None, "its output is not read"
    line = end.stdout.readline()
    if not line:
        raise EOFError
    found: dict[str, Any] = json.loads(line)
    return found
