"""A worker's calls, as the state clock's seams see them, and what the supervisor reads of them."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from stageline_vllm.plugin.worker_watch import WorkerWatch
from stageline_vllm.worker_clock import Step, WorkerClock
from stageline_vllm.worker_state import (
    BUSY_STATES,
    Operation,
    State,
    WorkerPhase,
    WorkerState,
    WorkerStateReader,
    WorkerStateWriter,
    worker_state_path,
)

MILLISECOND = 1_000_000


def decode(*names: str, finished: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(
        finished_req_ids=set(finished),
        num_scheduled_tokens=dict.fromkeys(names, 1),
        total_num_scheduled_tokens=len(names),
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(req_ids=list(names), num_computed_tokens=[10] * len(names)),
    )


class Tensor:
    def numel(self) -> int:
        return 576

    def element_size(self) -> int:
        return 2


class Handle:
    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait

    def is_completed(self) -> bool:
        return False


class Worker:
    """A watch on a clock that is set by hand."""

    def __init__(self, directory: Path, *, is_last_stage: bool, is_asynchronous: bool = False) -> None:
        self.now = 0
        self.steps: list[Step] = []
        path = worker_state_path(directory, 0)
        clock = WorkerClock(
            WorkerStateWriter(path), stage=0, now_nanoseconds=lambda: self.now, step_done=self.steps.append
        )
        self.watch = WorkerWatch(clock, is_last_stage=is_last_stage, is_asynchronous=is_asynchronous)
        self.reader = WorkerStateReader(path)

    def run(self, milliseconds: int) -> None:
        self.now += milliseconds * MILLISECOND

    def state(self) -> WorkerState:
        read = self.reader.read()
        assert read is not None
        return read

    def spent(self) -> dict[str, int]:
        """Milliseconds by state."""
        spent = self.state().clock.spent_at(self.now)
        assert sum(spent.values()) == self.now
        return {state.wire_name: value // MILLISECOND for state, value in spent.items() if value}


def test_a_stage_in_the_middle_receives_computes_sends_and_waits_for_the_send_in_its_next_step(tmp_path: Path) -> None:
    worker = Worker(tmp_path, is_last_stage=False)
    watch = worker.watch
    worker.run(3)
    watch.begin(decode("a", "b"))
    with watch.receiving():
        worker.run(7)
    worker.run(20)
    with watch.receiving():  # the tensors themselves, waited for when they are used
        worker.run(1)
    with watch.sending():
        worker.run(2)
    handles = watch.sent({"hidden": Tensor(), "note": 5}, [Handle(lambda: worker.run(4))])
    watch.executed()
    worker.run(1)
    watch.sample()
    watch.sampled()
    worker.run(9)
    assert worker.spent() == {
        "idle": 3, "wait.recv": 8, "busy.decode": 20, "wait.send": 2, "wait.host": 1, "wait.starved": 9,
    }  # fmt: skip
    watch.begin(decode("a", finished=("b",)))
    handles[0].wait()
    worker.run(5)
    watch.executed()
    watch.sample()
    watch.sampled()
    assert worker.spent()["wait.send"] == 6
    state = worker.state()
    assert (state.counters.steps[BUSY_STATES.index(State.DECODE)], state.clock.steps_done) == (2, 2)
    assert state.counters.hidden_bytes_sent == 1152
    assert state.clock.unfinished_requests == 1
    assert [(step.rows, step.tokens) for step in worker.steps] == [(2, 2), (1, 1)]


def test_sampling_is_compute_on_the_last_stage_only(tmp_path: Path) -> None:
    worker = Worker(tmp_path, is_last_stage=True)
    worker.watch.begin(decode("a"))
    worker.run(10)
    worker.watch.executed()
    worker.run(1)
    worker.watch.sample()
    assert worker.state().clock.operation is Operation.SAMPLE
    worker.run(3)
    worker.watch.sampled()
    assert worker.spent() == {"busy.decode": 13, "wait.host": 1}
    assert worker.state().counters.busy_nanoseconds[BUSY_STATES.index(State.DECODE)] == 13 * MILLISECOND


def test_an_asynchronous_schedulers_other_stages_wait_for_feedback(tmp_path: Path) -> None:
    worker = Worker(tmp_path, is_last_stage=False, is_asynchronous=True)
    worker.watch.begin(decode("a"))
    worker.watch.executed()
    worker.watch.sample()
    worker.run(6)
    worker.watch.sampled()
    assert worker.spent() == {"wait.feedback": 6}


def test_a_step_without_tokens_tells_that_nothing_is_left_and_is_no_step(tmp_path: Path) -> None:
    worker = Worker(tmp_path, is_last_stage=True)
    worker.watch.begin(decode("a"))
    worker.watch.executed()
    worker.watch.sample()
    worker.watch.sampled()
    worker.run(2)
    worker.watch.begin(decode(finished=("a",)))
    worker.watch.executed()
    worker.run(50)
    assert worker.spent() == {"wait.starved": 2, "idle": 50}
    assert worker.state().counters.kv_tokens == 0
    assert worker.state().clock.steps_done == 1


def test_transfers_outside_of_a_step_are_warm_up_and_not_counted(tmp_path: Path) -> None:
    worker = Worker(tmp_path, is_last_stage=False)
    with worker.watch.receiving(), worker.watch.sending():
        worker.run(5)
    handles = [Handle(lambda: None)]
    assert worker.watch.sent({"hidden": Tensor()}, list(handles)) == handles
    assert worker.spent() == {"idle": 5}
    assert worker.state().counters.hidden_bytes_sent == 0


def test_a_hang_shows_what_the_worker_was_in(tmp_path: Path) -> None:
    """Nothing is published any more, and the supervisor still reads the state and how long it lasts."""
    worker = Worker(tmp_path, is_last_stage=True)
    worker.watch.begin(decode("a"))
    with worker.watch.receiving():
        worker.run(90_000)
        state = worker.state()
        assert (state.clock.state, state.clock.operation) == (State.RECV, Operation.RECEIVE_HIDDEN)
        assert (state.clock.steps_begun, state.clock.steps_done, state.clock.unfinished_requests) == (1, 0, 1)
        assert worker.spent()["wait.recv"] == 90_000


def test_loading_is_idle_time_with_a_phase_and_an_operation(tmp_path: Path) -> None:
    worker = Worker(tmp_path, is_last_stage=True)
    with worker.watch.living(WorkerPhase.LOADING, Operation.LOAD):
        worker.run(5)
        assert worker.state().life.phase is WorkerPhase.LOADING
        assert worker.state().clock.operation is Operation.LOAD
    assert worker.spent() == {"idle": 5}
