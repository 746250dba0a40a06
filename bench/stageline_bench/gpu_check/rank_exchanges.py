"""Exchanges of ranks between their devices, compared and timed: `python -m stageline_bench.gpu_check.rank_exchanges`.

One process per rank, started as by a stage's supervisor: each sees one device, and they connect through the file and
the memory that the environment names. Prints its report as JSON.
"""

import json
import os
import sys
from statistics import median

import torch
from torch import Tensor

from stageline_api import env
from stageline_runtime.accelerator.cuda import CudaAccelerator
from stageline_runtime.accelerator.nccl import NcclRanks
from stageline_runtime.accelerator.protocol import Accelerator
from stageline_runtime.ranks.device_ranks import DeviceRanks
from stageline_runtime.ranks.device_rendezvous import RankMeeting, join_device_ranks
from stageline_runtime.ranks.rank_area import RankArea

SHAPES = ((1, 576), (8, 4096), (64, 4096), (512, 8192))
JOIN_SECONDS = 120.0
BATCHES = 5
BATCH = 50
"""All-reduces between two events."""


def numbers_of(rank: int, shape: tuple[int, ...]) -> Tensor:
    """Small integers in bfloat16, so that the order of a sum does not matter."""
    drawn = torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(rank))
    return drawn.to(torch.bfloat16)


def report(
    ranks: DeviceRanks, accelerator: Accelerator, shapes: tuple[tuple[int, int], ...] = SHAPES
) -> dict[str, str]:
    """Microseconds of a sum by shape; raises ValueError if an exchange has a wrong result."""
    figures = {}
    for shape in shapes:
        _compare(ranks, accelerator.device, shape)
        rows, columns = shape
        figures[f"[{rows}, {columns}]"] = f"{_microseconds(ranks, accelerator, shape):.1f}"
    ranks.check()
    return figures


def _compare(ranks: DeviceRanks, device: torch.device, shape: tuple[int, int]) -> None:
    own, parts = numbers_of(ranks.rank, shape), numbers_of(ranks.rank, (ranks.size, *shape))
    all_own = torch.stack([numbers_of(rank, shape) for rank in range(ranks.size)])
    all_parts = torch.stack([numbers_of(rank, (ranks.size, *shape)) for rank in range(ranks.size)])
    found = {
        "all-reduce": (ranks.all_reduce(own.to(device), "all-reduce"), all_own.sum(0)),
        "all-gather": (ranks.all_gather(own.to(device), "all-gather"), all_own),
        "reduce-scatter": (ranks.reduce_scatter(parts.to(device), "reduce-scatter"), all_parts.sum(0)[ranks.rank]),
    }
    for kind, (result, expected) in found.items():
        if not torch.equal(result.cpu(), expected):
            raise ValueError(f"{kind} of {list(shape)} on rank {ranks.rank}: {result.flatten()[:4].tolist()}")


def _microseconds(ranks: DeviceRanks, accelerator: Accelerator, shape: tuple[int, int]) -> float:
    rows = torch.zeros(shape, dtype=torch.bfloat16, device=accelerator.device)
    seconds = []
    for _ in range(BATCHES):
        begin = accelerator.main.record(timed=True)
        for _ in range(BATCH):
            ranks.all_reduce(rows, "all-reduce")
        end = accelerator.main.record(timed=True)
        end.wait()
        seconds.append(end.seconds_since(begin) / BATCH)
    return 1e6 * median(seconds)


def main() -> None:
    area, rank = RankArea(int(os.environ[env.RANK_AREA])), int(os.environ[env.STAGE_RANK])
    accelerator = CudaAccelerator()
    meeting = RankMeeting(os.environ[env.RANK_STORE], area, stage=0, rank=rank, timeout_seconds=JOIN_SECONDS)
    ranks = join_device_ranks(
        meeting, NcclRanks(), accelerator, timeout_seconds=JOIN_SECONDS, step_timeout_seconds=JOIN_SECONDS
    )
    figures = report(ranks, accelerator)
    if ranks.times.seconds <= 0.0:
        raise ValueError(f"rank {rank}: the device has timed no exchange")
    json.dump(figures, sys.stdout)
    sys.stdout.flush()
    accelerator.synchronize()
    ranks.close()


if __name__ == "__main__":
    main()
