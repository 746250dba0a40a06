"""Time of one sum over a stage's ranks, alone: `exchange_cost CORES ROWS COLUMNS`.

One process per core; they share one area like the ranks of a stage, and sum a `[ROWS, COLUMNS]` tensor of bfloat16
repeatedly. Writes one JSON line: the median microseconds of a sum, of each window of `WINDOW` sums.
"""

import json
import os
import subprocess
import sys
import time
from statistics import median
from typing import Final

import torch

from stageline_runtime.ranks.rank_area import RankArea
from stageline_runtime.ranks.shared_memory import SharedMemoryRanks

WINDOW: Final = 1000
WINDOWS: Final = 9
BUFFER_BYTES: Final = 1 << 20


def main(cores: list[int], rows: int, columns: int, area: int | None = None, rank: int = 0) -> None:
    """The first rank creates the area, starts the others and reports; each moves to its core first."""
    os.sched_setaffinity(0, {cores[rank]})
    torch.set_num_threads(1)
    others: list[subprocess.Popen[bytes]] = []
    if area is None:
        area = RankArea.create(len(cores), BUFFER_BYTES)
        command = [sys.executable, "-m", "stageline_bench.runtime.exchange_cost", ",".join(map(str, cores))]
        for other in range(1, len(cores)):
            sizes = [str(rows), str(columns), str(area), str(other)]
            others.append(subprocess.Popen([*command, *sizes], pass_fds=(area,)))
    windows = _windows(SharedMemoryRanks(RankArea(area), rank), torch.ones(rows, columns, dtype=torch.bfloat16))
    if rank == 0:
        print(json.dumps({"microseconds": windows}), flush=True)  # noqa: T201 - standard output is this program's answer
    for each in others:
        each.wait()


def _windows(ranks: SharedMemoryRanks, given: torch.Tensor) -> list[float]:
    """The median of each window, after one that warms caches and cores up."""
    found: list[float] = []
    for _ in range(WINDOWS + 1):
        times = []
        for _ in range(WINDOW):
            rows = given.clone()
            began = time.perf_counter_ns()
            ranks.all_reduce(rows, "all-reduce, measured")
            times.append(time.perf_counter_ns() - began)
        found.append(round(median(times) / 1e3, 2))
    return found[1:]


if __name__ == "__main__":
    _cores, *_numbers = sys.argv[1:]
    main([int(core) for core in _cores.split(",")], *map(int, _numbers))
