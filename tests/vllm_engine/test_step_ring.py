"""A vLLM worker's last steps in a file: what is written is what is read, and never half of a step."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from stageline_vllm import step_ring
from stageline_vllm.step_ring import RING_STEPS, StepRingReader, StepRingWriter, step_ring_path
from stageline_vllm.worker_clock import MAX_MARKS, Mark, Step
from stageline_vllm.worker_state import Operation, State

APPENDS_FOR_EVER = """
import sys
from pathlib import Path
from stageline_vllm.step_ring import *
from stageline_vllm.worker_clock import Mark, Step
from stageline_vllm.worker_state import Operation, State
writer, seq = StepRingWriter(Path(sys.argv[1])), 0
while True:
    seq += 1
    marks = tuple(Mark(State.DECODE, Operation.FORWARD, seq) for _ in range(seq % 24))
    writer.append(Step(seq, State.DECODE, seq % 1000, seq % 1000, marks, seq))
"""


def step(seq: int, marks: int = 2) -> Step:
    changes = tuple(Mark(State(at % len(State)), Operation(at % len(Operation)), 10**18 + at) for at in range(marks))
    return Step(seq, State.MIXED, 7, 519, changes, 10**18 + marks)


def test_steps_are_read_as_written_and_the_oldest_are_forgotten(tmp_path: Path) -> None:
    path = step_ring_path(tmp_path, 1)
    reader = StepRingReader(path)
    assert reader.steps() == []
    writer = StepRingWriter(path)
    assert reader.steps() == []
    steps = [step(seq, marks=seq % (MAX_MARKS + 1)) for seq in range(1, RING_STEPS + 51)]
    for one in steps:
        writer.append(one)
    assert reader.steps() == steps[50:]


@pytest.mark.parametrize(
    ("appended", "last", "expected"),
    [
        (0, 0, []),
        (0, 7, []),
        (3, 3, [1, 2, 3]),
        (40, 40, [*range(9, 41)]),
        (40, 41, [*range(10, 41)]),
        (RING_STEPS + 9, RING_STEPS + 9, [*range(RING_STEPS - 22, RING_STEPS + 10)]),
        (RING_STEPS + 9, 20, [*range(10, 21)]),
    ],
    ids=["none", "not written yet", "fewer", "newest", "one not written yet", "across the end", "overwritten"],
)
def test_the_steps_until_one_are_read_without_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, appended: int, last: int, expected: list[int]
) -> None:
    """A ping asks for 32 every second, also of an idle stage; the rest of the ring is 30 times as much."""
    path = step_ring_path(tmp_path, 0)
    writer, reader = StepRingWriter(path), StepRingReader(path)
    for seq in range(1, appended + 1):
        writer.append(step(seq))
    read: list[bytes] = []
    parse = step_ring._step

    def count_and_parse(record: bytes) -> Step | None:
        read.append(record)
        return parse(record)

    monkeypatch.setattr(step_ring, "_step", count_and_parse)
    assert [one.seq for one in reader.steps_until(last, 32)] == expected
    assert len(read) <= 32


@pytest.mark.thorough
def test_no_reader_sees_half_of_a_step(tmp_path: Path) -> None:
    path = step_ring_path(tmp_path, 0)
    writer = subprocess.Popen([sys.executable, "-c", APPENDS_FOR_EVER, str(path)])
    try:
        reader, until = StepRingReader(path), time.monotonic() + 60
        while len(reader.steps()) < RING_STEPS - 1:
            assert writer.poll() is None
            assert time.monotonic() < until
        for _ in range(50):
            steps = reader.steps()
            assert len(steps) > RING_STEPS // 2
            assert all(one.end_nanoseconds == one.seq and one.rows == one.seq % 1000 for one in steps)
            assert all(len(one.marks) == one.seq % 24 for one in steps)
            assert all(mark.at_nanoseconds == one.seq for one in steps for mark in one.marks)
    finally:
        writer.kill()
        writer.wait()
