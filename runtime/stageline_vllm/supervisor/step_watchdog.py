"""Whether a node of vLLM hangs, from its workers' state and from whether requests are unfinished. Pure.

While requests run, each worker has to end a step within the step limit. A worker inside a step names the operation
and the stage that it waits for: a neighbour for hidden states, the last stage for sampled tokens. A worker that
waits for a stage or for vLLM's scheduler reports it a little later, so that the stage where the hang began reports
first. When idle, no worker has to advance.

The engine reports whether requests are unfinished, and its report changes while a node hangs: a client times out
and leaves, a gateway retries. So a step that has begun has to end whatever the engine reports.
"""

from dataclasses import dataclass
from typing import Final

from stageline_api.failures import FailureClass
from stageline_runtime.termination import RuntimeFailure
from stageline_vllm.worker_state import Operation, State, WorkerState

BYSTANDER_SECONDS: Final = 3.0
"""Extra delay before a worker that waits for another stage or for the scheduler is reported."""
WAIT_FOR_FEEDBACK: Final = "wait for feedback"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One look at one worker."""

    state: WorkerState
    is_stopped: bool = False
    """The kernel has its process stopped (SIGSTOP, a debugger)."""


class StepWatchdog:
    """Fed at every look; `limit_seconds` is `timeouts.stepSeconds`."""

    def __init__(self, limit_seconds: float, stage: int, stage_count: int) -> None:
        self._limit = limit_seconds
        self._stage = stage
        self._stage_count = stage_count
        self._steps: dict[int, tuple[int, int]] = {}
        self._since: float | None = None

    def look(self, views: dict[int, WorkerView], now_seconds: float, *, outstanding: bool) -> RuntimeFailure | None:
        """The failure, once one is due; `views` by rank within the stage."""
        steps = {rank: (view.state.clock.steps_begun, view.state.clock.steps_done) for rank, view in views.items()}
        outstanding = outstanding or any(map(_has_to_advance, views.values()))
        if not outstanding or not views or steps != self._steps or self._since is None:
            self._steps = steps
            self._since = now_seconds if outstanding and views else None
            return None
        stuck = now_seconds - self._since
        for rank in sorted(views):
            if stuck > self._limit_of(views[rank]):
                return self._failure(rank, views[rank], len(views))
        return None

    def _limit_of(self, view: WorkerView) -> float:
        clock = view.state.clock
        is_bystander = clock.steps_begun == clock.steps_done and not view.is_stopped
        transfers = clock.operation in (Operation.RECEIVE_HIDDEN, Operation.SEND_HIDDEN)
        waits_for_peer = (transfers or clock.state is State.FEEDBACK) and not view.is_stopped
        return self._limit + (BYSTANDER_SECONDS if is_bystander or waits_for_peer else 0.0)

    def _failure(self, rank: int, view: WorkerView, num_ranks: int) -> RuntimeFailure:
        clock = view.state.clock
        operation, peer = self._operation(view)
        towards = "" if peer is None else f" (stage {peer})"
        worker = f"worker {rank}: " if num_ranks > 1 else ""
        return RuntimeFailure(
            FailureClass.STEP_TIMEOUT,
            f"{worker}step {clock.steps_begun}: {operation}{towards} took longer than {self._limit:g} s",
            operation=operation,
            step=clock.steps_begun,
            peer=peer,
        )

    def _operation(self, view: WorkerView) -> tuple[str, int | None]:
        clock = view.state.clock
        if view.is_stopped:
            return "worker stopped", None
        if clock.operation is Operation.RECEIVE_HIDDEN and self._stage > 0:
            return clock.operation.wire_name, self._stage - 1
        if clock.operation is Operation.SEND_HIDDEN and self._stage < self._stage_count - 1:
            return clock.operation.wire_name, self._stage + 1
        if clock.state is State.FEEDBACK:
            return WAIT_FOR_FEEDBACK, self._stage_count - 1
        if clock.steps_begun == clock.steps_done:
            return "wait for vLLM's scheduler", None
        return clock.operation.wire_name or "run a step", None


def _has_to_advance(view: WorkerView) -> bool:
    """Whether the worker is inside a step, or stopped between two of them."""
    clock = view.state.clock
    # Between `execute_model` and `sample_tokens` it waits for the scheduler; for feedback it waits inside a call.
    is_in_call = clock.operation is not Operation.NONE or clock.state is State.FEEDBACK
    is_in_step = clock.steps_begun > clock.steps_done and is_in_call
    return is_in_step or (view.is_stopped and clock.unfinished_requests > 0)
