"""The sampling kernels compared with the CPU's sampler, token by token: on a GPU, or in Triton's interpreter.

`TRITON_INTERPRET=1 python -m stageline_bench.gpu_check.sampling_cases` prints the tokens of both as JSON. It is a
separate program, because Triton chooses the interpreter when it is imported. `timings` measures the kernels.
"""

import itertools
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from stageline_runtime.accelerator.protocol import Accelerator
from stageline_runtime.models.protocol import CPU
from stageline_runtime.plan_bus.messages import RequestSampling
from stageline_runtime.sampling.device_sampler import draw_fused, sample_on_device
from stageline_runtime.sampling.sampler import sample

PADDING = 3
"""Columns after each row that are no tokens, and would win every draw."""
SMALL = 40
"""Maximum size of a vocabulary with frequent ties."""
TEMPERATURES = (0.0, 0.7, 1.5)
TOP_PS = (1e-6, 0.5, 0.95, 1.0)
TOP_KS = (0, 1, 40, 700, 2_000_000)
MIN_PS = (0.0, 0.05)
PAIR_DISTANCE = 0.125
"""Distance between the logits of two tokens; exact in float32."""
TIMED: dict[str, RequestSampling] = {
    "greedy": RequestSampling(temperature=0.0),
    "free": RequestSampling(temperature=1.0),
    "top-p": RequestSampling(temperature=0.7, top_p=0.95),
    "top-p, top-k": RequestSampling(temperature=0.7, top_p=0.95, top_k=20),
}
TIMED_ROWS = (1, 64, 256)
TIMED_VOCABULARIES = (32_000, 151_936)
TIMED_CALLS = 12
AHEAD_CYCLES = 100_000_000
"""The device is kept busy so long, about 50 ms, while the host queues all calls, so that no wait is timed."""


@dataclass(frozen=True)
class Case:
    """Rows sampled together from logits of one kind."""

    kind: str
    vocab_size: int
    rows: tuple[RequestSampling, ...]
    processors: int = 1
    seed: int = 0


def cases(*, thorough: bool = False) -> list[Case]:
    """All kinds of logits and parameters; `thorough` takes minutes in the interpreter."""
    return [*_small_cases(400 if thorough else 40), *_border_cases(), *_large_cases(thorough=thorough)]


def _small_cases(number: int) -> Iterator[Case]:
    """Random: few tokens, many of them equal, some masked."""
    drawn = random.Random(49)
    for seed in range(number):
        rows = tuple(
            RequestSampling(
                temperature=drawn.choice((0.0, 0.3, 1.0, 2.5)),
                top_p=drawn.choice((1.0, drawn.uniform(0.01, 0.999))),
                top_k=drawn.randrange(13),
                min_p=drawn.choice((0.0, drawn.uniform(0.01, 1.0))),
                seed=drawn.randrange(1 << 40),
                choice=drawn.randrange(4),
            )
            for _ in range(drawn.randint(1, 4))
        )
        yield Case("ties", drawn.randint(1, SMALL), rows, seed=seed)


def _border_cases() -> Iterator[Case]:
    """Both zeros, only equal logits, one token with all the probability, a single unmasked one, a share at its
    limit.
    """
    rows = tuple(
        RequestSampling(temperature=1.0, top_p=top_p, top_k=top_k, seed=seed)
        for seed, (top_p, top_k) in enumerate(itertools.product((0.3, 1.0), (0, 2, 100)))
    )
    for kind, vocab_size in (("zeros", 7), ("flat", 333), ("peaked", 333), ("alone", 333)):
        yield Case(kind, vocab_size, (RequestSampling(temperature=0.0), *rows))
    # The first token alone is so close to this share that float32 can't decide whether to keep the second.
    share = 1 / (1 + math.exp(-PAIR_DISTANCE))
    yield Case(
        "pair",
        2,
        tuple(
            RequestSampling(temperature=1.0, top_p=share * (1 + off), seed=seed)
            for seed, off in itertools.product(range(8), (-1e-10, 1e-10))
        ),
    )


def _large_cases(*, thorough: bool) -> Iterator[Case]:
    """Several tiles; by one program per row and by many."""
    everything = combinations()
    kinds = ("normal", "flat", "peaked")
    for place, kind in enumerate(kinds):
        yield Case(kind, 1_000, everything if thorough else everything[place :: 3 * len(kinds)])
    # Many of these first draw a token of the tail.
    yield Case("normal", 1_000, tuple(RequestSampling(temperature=2.0, top_p=0.8, seed=seed) for seed in range(24)))
    mixed = tuple(replace(row, seed=seed) for seed, row in enumerate(TIMED.values()))
    yield Case("normal", 49_152, everything if thorough else mixed, processors=4)
    yield Case("normal", 151_936, everything[:60] if thorough else mixed[3:], processors=132)
    if thorough:
        for kind, vocab_size in itertools.product(kinds[1:], (49_152, 151_936, 262_145)):
            yield Case(kind, vocab_size, everything, processors=132)


def combinations() -> tuple[RequestSampling, ...]:
    """Rows with all values of all parameters."""
    values = itertools.product(TEMPERATURES, TOP_PS, TOP_KS, MIN_PS)
    return tuple(
        RequestSampling(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, choice=seed % 3)
        for seed, (temperature, top_p, top_k, min_p) in enumerate(values)
    )


def _logits(case: Case) -> Tensor:
    """`[num_rows, vocab_size + PADDING]` float32."""
    shape, generator = (len(case.rows), case.vocab_size + PADDING), torch.Generator().manual_seed(case.seed)
    logits = _KINDS[case.kind](shape, generator)
    logits[:, case.vocab_size :] = 1000.0
    return logits


def _ties(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    logits = torch.randint(-24, 25, shape, generator=generator) / 8
    logits[torch.rand(shape, generator=generator) < 0.2] = float("-inf")
    logits[:, 0] = logits[:, 0].clamp(min=-3.0)
    return logits


def _alone(shape: tuple[int, int], _generator: torch.Generator) -> Tensor:
    logits = torch.full(shape, float("-inf"))
    logits[:, shape[1] // 2] = -2.0
    return logits


def _peaked(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    logits = torch.randn(shape, generator=generator)
    logits[:, shape[1] // 2] = 30.0
    return logits


_KINDS: dict[str, Callable[[tuple[int, int], torch.Generator], Tensor]] = {
    "ties": _ties,
    "zeros": lambda shape, generator: torch.tensor([-0.0, 0.0, -1.0])[torch.randint(3, shape, generator=generator)],
    "flat": lambda shape, _generator: torch.full(shape, 0.7),
    "peaked": _peaked,
    "alone": _alone,
    "pair": lambda shape, _generator: torch.arange(shape[1]).mul(-PAIR_DISTANCE).expand(shape).clone(),
    "normal": lambda shape, generator: (torch.randn(shape, generator=generator) * 4).bfloat16().float(),
}


def run(case: Case, device: torch.device = CPU) -> dict[str, Any]:
    """Tokens of the kernels, and of the CPU's sampler."""
    logits = _logits(case)
    rows, positions = list(case.rows), [case.seed + index for index in range(len(case.rows))]
    # The rows are not adjacent, so that reads past a row show in the results.
    there = logits.to(device)[:, : case.vocab_size]
    drawn = draw_fused(there, rows, positions, lambda tensor: tensor.to(device), case.processors)
    expected = sample(logits[:, : case.vocab_size].contiguous(), rows, positions)
    return {
        "kind": case.kind,
        "vocab_size": case.vocab_size,
        "rows": [{name: getattr(row, name) for name in ("temperature", "top_p", "top_k", "min_p")} for row in rows],
        "drawn": drawn.tolist(),
        "expected": expected.tolist(),
    }


def wrong_rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows with a different token."""
    each = zip(result["rows"], result["drawn"], result["expected"], strict=True)
    return [
        {"kind": result["kind"], "vocab_size": result["vocab_size"], **row, "drawn": drawn, "expected": expected}
        for row, drawn, expected in each
        if drawn != expected
    ]


def timings(device: Accelerator) -> dict[str, str]:
    """Medians in microseconds, by vocabulary and number of rows: of the device alone, and of the host's queueing."""
    figures: dict[str, str] = {}
    for vocab_size, num_rows in itertools.product(TIMED_VOCABULARIES, TIMED_ROWS):
        logits = torch.randn(num_rows, vocab_size, device=device.device) * 3
        figures |= {f"{name}, {num_rows} x {vocab_size}": _timed(logits, row, device) for name, row in TIMED.items()}
    return figures


def _timed(logits: Tensor, row: RequestSampling, device: Accelerator) -> str:
    rows = [replace(row, seed=seed) for seed in range(len(logits))]
    for _ in range(2):  # the first run compiles, and pins as much memory as the second needs
        torch.cuda._sleep(AHEAD_CYCLES)  # type: ignore[no-untyped-call]
        begin, on_host, ends = device.main.record(timed=True), [], []
        for position in range(TIMED_CALLS):
            started = time.perf_counter()
            sample_on_device(logits, rows, [position] * len(rows), device.place)
            on_host.append(time.perf_counter() - started)
            ends.append(device.main.record(timed=True))
        device.synchronize()
    on_device = [end.seconds_since(start) for start, end in itertools.pairwise([begin, *ends])]
    return f"{statistics.median(on_device) * 1e6:.0f} us (host {statistics.median(on_host) * 1e6:.0f})"


if __name__ == "__main__":
    torch.set_num_threads(1)
    json.dump([run(case) for case in cases()], sys.stdout)
