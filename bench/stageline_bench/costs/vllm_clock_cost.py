"""Cost of the state clock per step in a vLLM worker: `python -m stageline_bench.costs.vllm_clock_cost`.

Makes the same calls of `WorkerWatch` as the plugin around a decode of a middle stage, which has the most: a receive and
its wait, a send and the waits for its two tensors. The files are real ones. Before each step it reads a few megabytes,
as a model's layers do, so that the clock's own memory is as cold as in a worker. Measures the thread's CPU time; the
median of steps, so that load matters little.
"""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, Final

from stageline_vllm.plugin.last_words import LastWords
from stageline_vllm.plugin.worker_watch import WorkerWatch
from stageline_vllm.step_ring import StepRingWriter, step_ring_path
from stageline_vllm.worker_clock import WorkerClock
from stageline_vllm.worker_state import WorkerStateWriter, worker_state_path

STEPS: Final = 400
ROWS: Final = (1, 8, 32)
LAYER_BYTES: Final = 8 << 20
"""More than a core's own caches."""


@dataclass(frozen=True)
class _Tensor:
    def numel(self) -> int:
        return 576

    def element_size(self) -> int:
        return 2


@dataclass(frozen=True)
class _Handle:
    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


def clock_step_seconds(rows: int, steps: int = STEPS) -> float:
    """Median CPU seconds of the clock's part of one step."""
    with tempfile.TemporaryDirectory() as scratch:
        watch, layers = _watch(Path(scratch)), bytearray(LAYER_BYTES)
        tensors = {"hidden_states": _Tensor(), "residual": _Tensor()}
        spent = []
        for number in range(steps):
            scheduled = _decode(rows, number)
            layers[::64] = bytes(len(layers) // 64)
            began = time.thread_time_ns()
            _step(watch, scheduled, tensors)
            spent.append(time.thread_time_ns() - began)
    return median(spent) / 1e9


def _step(watch: WorkerWatch, scheduled: Any, tensors: dict[str, Any]) -> None:
    """One call of `execute_model` and one of `sample_tokens`, without their computation."""
    last_words = LastWords(watch.clock)
    with last_words.of_call():
        watch.begin(scheduled)
        with watch.receiving():
            pass
        with watch.receiving():
            pass
        with watch.sending():
            handles: list[Any] = [_Handle() for _ in tensors]
        for handle in watch.sent(tensors, handles):
            handle.wait()
        watch.executed()
    with last_words.of_call():
        watch.sample()
        watch.sampled()


def _watch(directory: Path) -> WorkerWatch:
    writer, ring = WorkerStateWriter(worker_state_path(directory, 0)), StepRingWriter(step_ring_path(directory, 0))
    return WorkerWatch(WorkerClock(writer, stage=0, step_done=ring.append), is_last_stage=False, is_asynchronous=False)


def _decode(rows: int, number: int) -> Any:
    """vLLM's object for a step of one token for each of `rows` requests."""
    names = [f"cmpl-{row}-0123456789abcdef" for row in range(rows)]
    return SimpleNamespace(
        finished_req_ids=set(),
        num_scheduled_tokens=dict.fromkeys(names, 1),
        total_num_scheduled_tokens=rows,
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(req_ids=names, num_computed_tokens=[100 + number] * rows),
    )


def main() -> None:
    """Measure and print."""
    for rows in ROWS:
        print(f"state clock, a step of {rows:2} rows: {clock_step_seconds(rows) * 1e6:6.1f} µs")  # noqa: T201


if __name__ == "__main__":
    main()
