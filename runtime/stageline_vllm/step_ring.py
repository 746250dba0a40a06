"""A worker's last steps, with the changes of state in each: a ring in a file, beside the worker's state.

One writer, any number of readers, as with `worker_state`: a record has a fixed place by its number and a checksum, so a
reader takes whole records, older or newer, and leaves out the one that is being written. From it the supervisor answers
`/timeline`, so that traces are drawn for a vLLM stage as for any other. Steps of all stages of a group have the same
numbers, because every worker is handed every step, in order.
"""

import mmap
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from stageline_vllm.worker_clock import MAX_MARKS, Mark, Step
from stageline_vllm.worker_state import Operation, State, map_anew

RING_STEPS: Final = 1024
_HEAD: Final = struct.Struct("<IQBBIIQ")
"""Checksum of the rest, number, kind, number of marks, rows, tokens, end."""
_MARKS: Final = struct.Struct("<" + "BBQ" * MAX_MARKS)
_RECORD_BYTES: Final = (_HEAD.size + _MARKS.size + 7) // 8 * 8
_FILE_BYTES: Final = RING_STEPS * _RECORD_BYTES


def step_ring_path(directory: Path, rank: int) -> Path:
    """The file of the worker with `rank` inside its stage."""
    return directory / f"worker-{rank}.steps"


class StepRingWriter:
    """Owned by the worker; used by one thread at a time."""

    def __init__(self, path: Path) -> None:
        """Create the file, replacing an earlier one.

        Raises:
            OSError: the directory isn't there or can't be written to.
        """
        self._map = map_anew(path, _FILE_BYTES)

    def append(self, step: Step) -> None:
        """Keep the step in place of the one `RING_STEPS` before it."""
        values = [value for mark in step.marks for value in mark]
        values += [0] * (3 * MAX_MARKS - len(values))
        marks = _MARKS.pack(*values)
        head = (step.seq, step.kind, len(step.marks), step.rows, step.tokens, step.end_nanoseconds)
        body = _HEAD.pack(0, *head)[4:] + marks
        begin = step.seq % RING_STEPS * _RECORD_BYTES
        self._map[begin : begin + 4 + len(body)] = zlib.crc32(body).to_bytes(4, "little") + body


class StepRingReader:
    """Owned by the supervisor; opens the file once it is there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._map: mmap.mmap | None = None

    def steps(self) -> list[Step]:
        """The steps that are kept, oldest first; none before the worker has a clock."""
        return sorted(step for _, step in self._at(range(RING_STEPS)))

    def steps_until(self, last: int, count: int) -> list[Step]:
        """The stored ones of the `count` steps up to number `last`, oldest first. No other step is read."""
        numbers = range(max(1, last - min(count, RING_STEPS) + 1), last + 1)
        return [step for number, step in self._at(numbers) if step.seq == number]

    def _at(self, numbers: range) -> Iterator[tuple[int, Step]]:
        """The intact records in the slots of these steps; a slot may hold another step."""
        if self._map is None:
            try:
                with self._path.open("rb") as file:
                    self._map = mmap.mmap(file.fileno(), _FILE_BYTES, prot=mmap.PROT_READ)
            except (FileNotFoundError, ValueError):
                return
        for number in numbers:
            begin = number % RING_STEPS * _RECORD_BYTES
            if (step := _step(self._map[begin : begin + _RECORD_BYTES])) is not None:
                yield number, step


def _step(record: bytes) -> Step | None:
    checksum, seq, kind, count, rows, tokens, end = _HEAD.unpack_from(record)
    if seq == 0 or checksum != zlib.crc32(record[4 : _HEAD.size + _MARKS.size]):
        return None
    values = _MARKS.unpack_from(record, _HEAD.size)
    marks = (Mark(State(values[at]), Operation(values[at + 1]), values[at + 2]) for at in range(0, 3 * count, 3))
    return Step(seq, State(kind), rows, tokens, tuple(marks), end)
