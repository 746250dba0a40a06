"""The file between a vLLM worker and its supervisor: what is written is what is read, at any moment, whatever dies."""

import itertools
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline_vllm.worker_clock import Step, WorkerClock, busy_nanoseconds
from stageline_vllm.worker_state import (
    BUSY_STATES,
    FILE_BYTES,
    STEP_BOUNDS,
    WAIT_STATES,
    Life,
    Operation,
    State,
    WorkerPhase,
    WorkerStateError,
    WorkerStateReader,
    WorkerStateWriter,
    worker_state_path,
)

WRITES_FOR_EVER = """
import sys
from pathlib import Path
from stageline_vllm.worker_state import *
writer = WorkerStateWriter(Path(sys.argv[1]))
writer.publish_life(Life(pid=1, stage=0, rank=0, phase=WorkerPhase.READY))
writer.publish_counters(Counters())
number = 0
while True:
    number += 1
    counts = (number, number, number)
    writer.publish_clock(number, number, State.IDLE, Operation.NONE, counts, [number] * len(State))
"""


class Moments:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return worker_state_path(tmp_path, 0)


def test_nothing_is_read_before_a_worker_has_published(path: Path) -> None:
    reader = WorkerStateReader(path)
    assert reader.read() is None
    WorkerStateWriter(path)
    assert reader.read() is None


def test_what_a_worker_publishes_is_what_the_supervisor_reads(path: Path) -> None:
    now, steps = Moments(), list[Step]()
    clock = WorkerClock(WorkerStateWriter(path), stage=1, rank=3, now_nanoseconds=now, step_done=steps.append)
    clock.live(replace(clock.life, phase=WorkerPhase.READY, first_layer=15, end_layer=30, memory_bytes=2**40))
    clock.begin_step(State.DECODE, rows=8, tokens=8, unfinished_requests=8)
    for state, operation, nanoseconds in (
        (State.RECV, Operation.RECEIVE_HIDDEN, 2_000_000),
        (State.DECODE, Operation.FORWARD, 4_000_000),
        (State.SEND, Operation.SEND_HIDDEN, 500_000),
    ):
        clock.enter(state, operation)
        now.now += nanoseconds
    clock.note_sent(9216)
    clock.wait_for_scheduler()
    clock.end_step()
    now.now += 700

    read = WorkerStateReader(path).read()

    assert read is not None
    assert (read.life.stage, read.life.rank, read.life.pid) == (1, 3, os.getpid())
    assert (read.life.phase, read.life.end_layer, read.life.memory_bytes) == (WorkerPhase.READY, 30, 2**40)
    assert (read.clock.steps_begun, read.clock.steps_done, read.clock.unfinished_requests) == (1, 1, 8)
    spent = read.clock.spent_at(now.now)
    assert {state: value for state, value in spent.items() if value} == {
        State.RECV: 2_000_000,
        State.DECODE: 4_000_000,
        State.SEND: 500_000,
        State.STARVED: 700,
    }
    decode = BUSY_STATES.index(State.DECODE)
    assert (read.counters.steps[decode], read.counters.tokens[decode]) == (1, 8)
    assert read.counters.busy_nanoseconds[decode] == 4_000_000
    assert read.counters.step_seconds[decode][STEP_BOUNDS.index(0.005)] == 1
    assert sum(map(sum, read.counters.step_seconds)) == 1
    assert read.counters.hidden_bytes_sent == 9216
    assert [(step.rows, busy_nanoseconds(step)) for step in steps] == [(8, 4_000_000)]


def test_a_wait_without_unfinished_requests_is_idle_and_not_starved(path: Path) -> None:
    clock = WorkerClock(WorkerStateWriter(path), stage=0)
    clock.begin_step(State.PREFILL, rows=1, tokens=5, unfinished_requests=1)
    clock.enter(State.PREFILL, Operation.FORWARD)
    clock.wait_for_scheduler()
    states = [clock.state]
    clock.note_unfinished(0, kv_tokens=0)
    clock.wait_for_scheduler()
    assert [*states, clock.state] == [State.STARVED, State.IDLE]


@given(
    changes=st.lists(
        st.tuples(st.sampled_from(list(State)), st.integers(0, 10**10), st.booleans(), st.integers(-(10**9), 10**9)),
        max_size=60,
    )
)
def test_states_sum_to_wall_at_any_moment(
    changes: list[tuple[State, int, bool, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Also where a change is told later, with a moment of its own that may lie before the last one."""
    path = worker_state_path(tmp_path_factory.mktemp("state"), 0)
    now, steps = Moments(), list[Step]()
    clock = WorkerClock(WorkerStateWriter(path), stage=0, now_nanoseconds=now, step_done=steps.append)
    reader, started = WorkerStateReader(path), now.now
    for state, nanoseconds, is_step, offset in changes:
        now.now += nanoseconds
        if is_step:
            clock.begin_step(State.MIXED, rows=1, tokens=2, unfinished_requests=1)
        clock.enter(state, at_nanoseconds=min(now.now, now.now + offset))
        read = reader.read()
        assert read is not None
        assert sum(read.clock.spent_at(now.now).values()) == now.now - started
    # Steps tile the time: each begins where the one before it ended.
    for before, after in itertools.pairwise(steps):
        if len(after.marks) and len(after.marks) < 20:
            assert after.marks[0].at_nanoseconds == before.end_nanoseconds


def test_every_state_is_named_as_boards_name_it() -> None:
    assert [state.wire_name for state in (State.IDLE, *BUSY_STATES, *WAIT_STATES)] == [
        "idle",
        "busy.prefill",
        "busy.decode",
        "busy.mixed",
        "busy.dummy",
        "wait.recv",
        "wait.send",
        "wait.feedback",
        "wait.host",
        "wait.starved",
    ]
    assert len({operation.wire_name for operation in Operation}) == len(Operation)


def test_no_reader_sees_half_of_a_publication_and_a_killed_writer_leaves_a_whole_one(path: Path) -> None:
    """All numbers of a publication are equal, so one made of two would show. The writer is killed while it writes."""
    for _ in range(3):
        path.unlink(missing_ok=True)
        writer = subprocess.Popen([sys.executable, "-c", WRITES_FOR_EVER, str(path)])
        reader = WorkerStateReader(path)
        try:
            until = time.monotonic() + 60
            while (read := reader.read()) is None:
                assert writer.poll() is None
                assert time.monotonic() < until
                time.sleep(0.01)
            seen = 0
            while seen < 2000:
                read = reader.read()
                assert read is not None
                numbers = {read.clock.started_nanoseconds, read.clock.steps_done, *read.clock.spent_nanoseconds}
                assert len(numbers) == 1, read.clock
                seen += 1
        finally:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        last = reader.read()
        assert last is not None
        assert last.clock.steps_done >= read.clock.steps_done


def test_what_is_being_written_for_the_first_time_is_not_there_yet(path: Path) -> None:
    """As a writer that stands still in the middle of it leaves the file: an error would be told of a healthy worker."""
    writer = WorkerStateWriter(path)
    reader = WorkerStateReader(path)
    before = path.read_bytes()
    writer.publish_life(Life(pid=0x7E57AB1E, stage=0, rank=0, phase=WorkerPhase.READY))
    place = path.read_bytes().index((0x7E57AB1E).to_bytes(4, "little"))
    assert place < len(before)
    with path.open("r+b") as file:
        file.seek(place)
        file.write(b"\0")
    assert reader.read() is None


def test_a_slot_that_was_being_written_leaves_the_one_before(path: Path) -> None:
    """As a kill in the middle of a publication leaves the file: the newer slot's checksum is wrong."""
    clock = WorkerClock(WorkerStateWriter(path), stage=0)
    reader = WorkerStateReader(path)
    for phase in (WorkerPhase.LOADING, WorkerPhase.WARMING, WorkerPhase.READY):
        clock.enter_phase(phase)
    clock.live(replace(clock.life, memory_bytes=0x7E57AB1E))
    content = path.read_bytes()
    place = content.index((0x7E57AB1E).to_bytes(4, "little"))
    with path.open("r+b") as file:
        file.seek(place)
        file.write(b"\0")

    read = reader.read()

    assert read is not None
    assert (read.life.phase, read.life.memory_bytes) == (WorkerPhase.READY, 0)


def test_a_worker_that_replaces_the_file_is_read_from_then_on(path: Path) -> None:
    reader = WorkerStateReader(path)
    WorkerClock(WorkerStateWriter(path), stage=0).enter_phase(WorkerPhase.READY)
    first = reader.read()
    WorkerClock(WorkerStateWriter(path), stage=0)
    second = reader.read()
    assert first is not None
    assert second is not None
    assert (first.life.phase, second.life.phase) == (WorkerPhase.READY, WorkerPhase.STARTING)


@pytest.mark.parametrize("content", [b"", b"short", b"SLVLLM00" + bytes(FILE_BYTES)])
def test_a_file_of_something_else_is_refused_by_name(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(WorkerStateError, match=r"worker-0\.state"):
        WorkerStateReader(path).read()


def test_a_failure_leaves_the_phase_that_it_happened_in_and_its_message_is_cut(path: Path) -> None:
    clock = WorkerClock(WorkerStateWriter(path), stage=0)
    clock.enter_phase(WorkerPhase.WARMING)
    clock.fail("ü" * 1000)
    read = WorkerStateReader(path).read()
    assert read is not None
    assert read.life.phase is WorkerPhase.WARMING
    assert read.life.message.startswith("ü" * 128)
