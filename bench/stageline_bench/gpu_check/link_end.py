"""One end of two NCCL links, hidden tensors one way and feedback the other, without engine or model.

`python -m stageline_bench.gpu_check.link_end STAGE STORE SEED PLANS [--lose-peer]` sends plans of random sizes in
random orders and compares every byte on the device. With `--lose-peer` stage 1 then waits for a tensor that never
arrives while its peer is killed or stopped, and reports what a stage would detect. Prints a line of JSON for each.
"""

import argparse
import json
import os
import random
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import NoReturn

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from stageline_bench.gpu_check.shared_card import SharedCard, node_environment
from stageline_runtime.accelerator.cuda import load_kernels_eagerly
from stageline_runtime.accelerator.protocol import Accelerator
from stageline_runtime.transport.nccl import NcclTransport
from stageline_runtime.transport.nccl_meeting import join_nccl
from stageline_runtime.transport.protocol import FEEDBACK_WIDTH, PeerLostError, WireSizes

SIZES = WireSizes(hidden_size=2048, dtype=torch.bfloat16, max_step_tokens=512, max_rows=64)
JOIN_SECONDS = 8.0
"""Links fail after twice this time, if a peer is stopped."""
MAX_LAG = 4
"""Maximum number of plans between a plan and the earlier one that provides its feedback."""
MAX_AHEAD = 3
"""Maximum number of plans known before they run."""
MOST_SLEEP_CYCLES = 100_000
WAIT_SECONDS = 40.0
PAST_SECONDS = 4.0
"""How long to watch, after the error is known, whether the device passes the receive."""
_PRIME = 251
"""Numbers below it are exact in bfloat16."""


@dataclass(frozen=True, slots=True)
class Carried:
    plans: int
    wrong: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Loss:
    """Stage 1's detection of its lost peer; times are of the monotonic clock, None if it did not happen."""

    error: str
    reported_at: float | None
    past_at: float | None
    """When the device passed the receive, which then ended without its data."""
    exiting_at: float


class Course:
    """Random values that both ends draw alike: each plan's number of tokens and rows, and their contents."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._draw = random.Random(seed)
        self._device = device
        self._sizes: list[tuple[int, int]] = []

    def sizes(self, seq: int) -> tuple[int, int]:
        while len(self._sizes) <= seq:
            tokens = self._draw.randint(1, SIZES.max_step_tokens)
            self._sizes.append((tokens, self._draw.randint(1, SIZES.max_rows)))
        return self._sizes[seq]

    def hidden(self, seq: int) -> Tensor:
        return self._numbers(seq, self.sizes(seq)[0], SIZES.hidden_size).to(SIZES.dtype)

    def rows(self, seq: int) -> Tensor:
        return self._numbers(seq, self.sizes(seq)[1], FEEDBACK_WIDTH)

    def _numbers(self, seq: int, rows: int, columns: int) -> Tensor:
        numbers = torch.arange(rows * columns, device=self._device).add_(7919 * seq).remainder_(_PRIME)
        return numbers.view(rows, columns)


def carry(transport: NcclTransport, accelerator: Accelerator, stage: int, seed: int, plans: int) -> Carried:
    """Run `plans` plans as a stage does; returns how many tensors differ from the sent ones."""
    course, own_draw = Course(seed, accelerator.device), random.Random(f"{seed}/{stage}")
    wrong = torch.zeros((), dtype=torch.int64, device=accelerator.device)
    began = time.monotonic()
    run = _run_first if stage == 0 else _run_last
    run(transport, course, own_draw, wrong, plans)
    count = int(wrong)
    transport.check(plans)
    return Carried(plans, count, time.monotonic() - began)


def _run_first(transport: NcclTransport, course: Course, draw: random.Random, wrong: Tensor, plans: int) -> None:
    waiting: deque[int] = deque()
    for seq in range(plans):
        transport.post_feedback(seq, course.sizes(seq)[1])
        waiting.append(seq)
        lag = draw.randint(1, MAX_LAG)
        _compute(draw)
        transport.send_hidden(seq, course.hidden(seq))
        while len(waiting) > lag:
            _take_feedback(transport, course, waiting.popleft(), wrong)
    while waiting:
        _take_feedback(transport, course, waiting.popleft(), wrong)


def _take_feedback(transport: NcclTransport, course: Course, seq: int, wrong: Tensor) -> None:
    wrong.add_((transport.wait_feedback(seq) != course.rows(seq)).any())


def _run_last(transport: NcclTransport, course: Course, draw: random.Random, wrong: Tensor, plans: int) -> None:
    posted = 0
    for seq in range(plans):
        while posted < min(plans, seq + draw.randint(1, MAX_AHEAD)):
            transport.post_hidden(posted, course.sizes(posted)[0])
            posted += 1
        wrong.add_((transport.wait_hidden(seq) != course.hidden(seq)).any())
        _compute(draw)
        transport.send_feedback(seq, course.rows(seq))


def _compute(draw: random.Random) -> None:
    torch.cuda._sleep(draw.randrange(MOST_SLEEP_CYCLES))  # type: ignore[no-untyped-call]


def await_loss(transport: NcclTransport, accelerator: Accelerator, seq: int) -> Loss:
    """Wait for a hidden tensor of a peer that is being killed or stopped."""
    transport.post_hidden(seq, 1)
    transport.wait_hidden(seq)
    received = accelerator.main.record()
    error, reported_at, past_at = "nothing is reported", None, None
    end = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < end and (reported_at is None or past_at is None):
        if past_at is None and received.is_done():
            past_at = time.monotonic()
        if reported_at is None:
            try:
                transport.check(seq)
            except PeerLostError as lost:
                error, reported_at = str(lost), time.monotonic()
                end = min(end, reported_at + PAST_SECONDS)
        time.sleep(0.0002)
    return Loss(error, reported_at, past_at, time.monotonic())


def main() -> NoReturn:
    parser = argparse.ArgumentParser()
    parser.add_argument("stage", type=int)
    parser.add_argument("store")
    parser.add_argument("seed", type=int)
    parser.add_argument("plans", type=int)
    parser.add_argument("--lose-peer", action="store_true")
    options = parser.parse_args()
    os.environ.update(node_environment(f"end-{options.stage}"))
    load_kernels_eagerly()
    status, held = 0, list[NcclTransport]()
    try:
        _take_part(options, held)
    except Exception as error:  # any error of torch or NCCL: it must not leave this function with the group
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # as a stage does: torch's own exit waits for work that a lost peer never finishes


def _take_part(options: argparse.Namespace, held: list[NcclTransport]) -> None:
    """Run the plans. The transport stays in `held`: its end would wait for work that a lost peer never finishes."""
    accelerator = SharedCard(f"end {options.stage}")
    store = FileStore(options.store, 2)
    store.set(f"here/{options.stage}", "1")
    store.wait([f"here/{1 - options.stage}"])
    transport = join_nccl(
        store,
        accelerator,
        SIZES,
        stage=options.stage,
        stage_count=2,
        timeout_seconds=JOIN_SECONDS,
        step_timeout_seconds=JOIN_SECONDS,
    )
    held.append(transport)
    _print(carry(transport, accelerator, options.stage, options.seed, options.plans))
    if not options.lose_peer:
        return
    if options.stage == 0:
        time.sleep(2 * WAIT_SECONDS)  # until it is killed
    _print(await_loss(transport, accelerator, options.plans))


def _print(found: Carried | Loss) -> None:
    sys.stdout.write(json.dumps(asdict(found)) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
