"""Cost of a decode step in a stage besides its layers: `python -m stageline_bench.costs.step_cost`.

First and last stage of two, eight rows per step, each in this process: real plans over a real bus, the stage's own
runner, sampling, clock and counters; no layers and no network between stages. Prints microseconds of the thread's CPU
time per step, the tenth percentile, for each activity between two steps (`between_steps`). Load makes all of it slower,
so compare two states of the code alternately.
"""

import socket
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from stageline_api.runtime_config import LayerRange
from stageline_bench.costs import between_steps
from stageline_bench.runtime.group.paced_stage import PacedModel
from stageline_bench.runtime.paced import HIDDEN_SIZE, write_paced_model
from stageline_runtime.model_facts.model_config import ModelConfig, read_model_config
from stageline_runtime.models.protocol import StageShape
from stageline_runtime.plan_bus.bus import StageBus, encode_frame
from stageline_runtime.plan_bus.messages import PlanRow, RequestSampling, SlotFill, StepDone, StepPlan
from stageline_runtime.stage.step.runner import StageRunner, step_kind
from stageline_runtime.stage.telemetry.progress import StageProgress
from stageline_runtime.stage.telemetry.state_clock import StateClock, Timeline
from stageline_runtime.stage.telemetry.watchdog import Watchdog
from stageline_runtime.transport.protocol import FEEDBACK_WIDTH

STAGES = 2
ROWS = 8
COHORTS = 2
SLOT_TOKENS = 4096
"""More than the steps need."""
_READ_BYTES = 1 << 16


class _NoWire:
    """Returns a neighbour's tensors at once."""

    def __init__(self) -> None:
        self._hidden = torch.zeros(ROWS, HIDDEN_SIZE, dtype=torch.bfloat16)
        self._feedback = torch.full((ROWS, FEEDBACK_WIDTH), 5)

    def post_hidden(self, seq: int, num_tokens: int) -> None:
        """Does nothing."""

    def hidden_has_come(self, _seq: int) -> bool:
        return True

    def wait_hidden(self, _seq: int) -> Tensor:
        return self._hidden

    def send_hidden(self, seq: int, hidden: Tensor) -> None:
        """Does nothing."""

    def would_block(self) -> bool:
        return False

    def check(self, seq: int) -> None:
        """Does nothing."""

    def post_feedback(self, seq: int, num_rows: int) -> None:
        """Does nothing."""

    def wait_feedback(self, _seq: int) -> Tensor:
        return self._feedback

    def send_feedback(self, seq: int, rows: Tensor) -> None:
        """Does nothing."""


class _Stage:
    """One stage of two as in its process, between an engine's socket and `_NoWire`."""

    def __init__(self, stage: int, config: ModelConfig) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self._bus = StageBus(socket.create_connection(listener.getsockname()))
        self._engine, _ = listener.accept()
        listener.close()
        shape = StageShape(
            layers=LayerRange(first=0, last=0),
            is_first=stage == 0,
            is_last=stage == STAGES - 1,
            dtype=torch.bfloat16,
            num_cohorts=COHORTS,
            num_slots=COHORTS * ROWS,
            slot_tokens=SLOT_TOKENS,
        )
        timeline = Timeline()
        clock = StateClock(listener=timeline.mark)
        self._progress = StageProgress(stage=stage, stage_count=STAGES, incarnation=1, clock=clock, timeline=timeline)
        self._runner = StageRunner(
            PacedModel(config, shape, 0.0, 0.0),
            _NoWire(),
            clock,
            Watchdog(60.0, lambda: False, _end),
            stage=stage,
            stage_count=STAGES,
            num_slots=shape.num_slots,
            hidden_size=HIDDEN_SIZE,
            dtype=torch.bfloat16,
        )

    def give(self, plan: StepPlan) -> None:
        """The engine's part: not measured."""
        self._engine.sendall(encode_frame(plan))

    def step(self, plan_before: StepPlan) -> StepPlan:
        """Take the next plan off the bus and run the previous one, as `StageProcess` does; returns the next."""
        plan = self._bus.receive(0)
        assert isinstance(plan, StepPlan), plan
        self._runner.accept(plan)
        sampled = self._runner.run(plan_before).rows()
        if self._runner.is_last:
            self._bus.send(StepDone(plan_before.seq, sampled))
        self._progress.count_step(plan_before, step_kind(plan_before))
        return plan

    def take_answer(self) -> None:
        """The engine's part: not measured."""
        if self._runner.is_last:
            self._engine.recv(_READ_BYTES)

    def accept_first(self, plan: StepPlan) -> StepPlan:
        self._runner.accept(plan)
        return plan

    def close(self) -> None:
        self._bus.close()
        self._engine.close()


def _end(failure: Exception) -> NoReturn:
    raise failure


def _plan(seq: int) -> StepPlan:
    """A plan of microbatch `seq % COHORTS`; its first one fills the slots."""
    cohort, turn = seq % COHORTS, seq // COHORTS
    slots = range(cohort * ROWS, (cohort + 1) * ROWS)
    greedy = RequestSampling(temperature=0.0)
    fills = tuple(SlotFill(slot, 1, greedy) for slot in slots) if turn == 0 else ()
    rows = tuple(PlanRow(slot, 1, turn, 1, (7,) if turn == 0 else (), True) for slot in slots)
    return StepPlan(seq, cohort, fills, rows, ROWS, seq - COHORTS, True, False)


@torch.inference_mode()
def microseconds_of_a_step(stage: int, config: ModelConfig, between: Callable[[], None], steps: int) -> float:
    """CPU time of the stage's thread, the tenth percentile of `steps`."""
    measured = _Stage(stage, config)
    spent: list[int] = []
    plan = measured.accept_first(_plan(0))
    for seq in range(1, steps + 1):
        measured.give(_plan(seq))
        between()
        began = time.thread_time_ns()
        plan = measured.step(plan)
        spent.append(time.thread_time_ns() - began)
        measured.take_answer()
    measured.close()
    return sorted(spent)[len(spent) // 10] / 1000


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        config = read_model_config(write_paced_model(Path(directory) / "model", STAGES))
    for stage, name in ((0, "first"), (STAGES - 1, "last")):
        print(f"{name} stage:", *between_steps.each(partial(microseconds_of_a_step, stage, config)))  # noqa: T201


if __name__ == "__main__":
    main()
