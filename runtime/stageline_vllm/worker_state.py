"""The file in which a vLLM worker publishes its state for its supervisor: one writer, any number of readers.

The worker maps the file and publishes three sections, each whenever it changes: its life (phase, memory held), its
clock (state, operation, seconds spent) and its counters. A section has two slots, written alternately, each with a
sequence number and a checksum over all of it. A reader takes the newest slot with a valid checksum, so it never
sees half of a publication; a worker killed during a write leaves the previous publication. Neither side waits: the
writer makes no system call, and the reader needs nothing from the writer, so a hung worker can still be read.

Seconds are nanoseconds of the host's monotonic clock. The running state is extended to the moment of reading, so
the states always sum to the time since the worker's clock began. Only numbers and one short text are in the file;
no content is evaluated.
"""

import mmap
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

from stageline_api.telemetry import metric_buckets
from stageline_api.telemetry import timeline as wire

DIRECTORY_VARIABLE: Final = "STAGELINE_WORKER_STATE"
"""Environment variable of a vLLM node: the directory of its workers' files."""
MESSAGE_BYTES: Final = 600
STEP_BOUNDS: Final = metric_buckets.STEP
_MAGIC: Final = b"SLVLLM01"
_READ_ATTEMPTS: Final = 64


class State(IntEnum):
    """What a worker's time is spent on. Exactly one at any time."""

    IDLE = 0
    PREFILL = 1
    DECODE = 2
    MIXED = 3
    DUMMY = 4
    RECV = 5
    SEND = 6
    FEEDBACK = 7
    HOST = 8
    STARVED = 9

    @property
    def wire_name(self) -> str:
        """As timelines and state counters call it: `busy.decode`, `wait.recv`, `idle`."""
        if self is State.IDLE:
            return wire.IDLE_STATE
        return (wire.BUSY_PREFIX if self in BUSY_STATES else wire.WAIT_PREFIX) + self.name.lower()


BUSY_STATES: Final = (State.PREFILL, State.DECODE, State.MIXED, State.DUMMY)
WAIT_STATES: Final = (State.RECV, State.SEND, State.FEEDBACK, State.HOST, State.STARVED)


class Operation(IntEnum):
    """What exactly is under way."""

    NONE = 0
    FORWARD = 1
    SAMPLE = 2
    RECEIVE_HIDDEN = 3
    SEND_HIDDEN = 4
    LOAD = 5
    WARM = 6

    @property
    def wire_name(self) -> str:
        return _OPERATION_NAMES[self]


_OPERATION_NAMES: Final = {
    Operation.NONE: "",
    Operation.FORWARD: wire.FORWARD,
    Operation.SAMPLE: "sample",
    Operation.RECEIVE_HIDDEN: wire.RECEIVE_HIDDEN,
    Operation.SEND_HIDDEN: wire.SEND_HIDDEN,
    Operation.LOAD: "load model",
    Operation.WARM: "warm up",
}


class WorkerPhase(IntEnum):
    """Where the worker is in its life; the order is the usual order."""

    STARTING = 0
    LOADING = 1
    WARMING = 2
    READY = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What changes a few times in a worker's life."""

    pid: int
    stage: int
    rank: int
    """Rank inside the stage (tensor parallel)."""
    phase: WorkerPhase
    first_layer: int = 0
    end_layer: int = 0
    """One past the last layer held; equal to the first one before the model is made."""
    memory_bytes: int = 0
    """Weights and KV cache."""
    kv_blocks: int = 0
    """Blocks of KV cache, one request holding several."""
    kv_capacity_tokens: int = 0
    message: str = ""
    """The exception that left one of its calls, cut to `MESSAGE_BYTES`; empty while none has. The phase stays the one
    that it happened in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """The account of time as last published; `spent_at` brings it up to a moment."""

    started_nanoseconds: int
    since_nanoseconds: int
    """Since when `state` holds."""
    state: State
    operation: Operation
    steps_begun: int
    steps_done: int
    """Steps with tokens, as far as this worker is concerned. Must advance while requests are unfinished."""
    unfinished_requests: int
    """Requests that the worker knows and that the scheduler has not reported finished."""
    spent_nanoseconds: tuple[int, ...]
    """By `State`; the running state up to `since_nanoseconds` only."""

    def spent_at(self, now_nanoseconds: int) -> dict[State, int]:
        """Nanoseconds in each state up to `now`; they sum to `now - started` exactly."""
        spent = dict(zip(State, self.spent_nanoseconds, strict=True))
        spent[self.state] += max(0, now_nanoseconds - self.since_nanoseconds)
        return spent


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Counted at the end of each step. Tuples are in the order of `BUSY_STATES`."""

    steps: tuple[int, ...] = (0, 0, 0, 0)
    tokens: tuple[int, ...] = (0, 0, 0, 0)
    busy_nanoseconds: tuple[int, ...] = (0, 0, 0, 0)
    step_seconds: tuple[tuple[int, ...], ...] = ((0,) * (len(STEP_BOUNDS) + 1),) * 4
    """Steps by kind and by bucket of `STEP_BOUNDS` (not cumulative); the last bucket is above all bounds."""
    hidden_bytes_sent: int = 0
    kv_tokens: int = 0
    """Tokens of the unfinished requests that have keys and values in this worker's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    life: Life
    clock: Clock
    counters: Counters


_HEAD: Final = "<IQ"
"""Of a slot: checksum of what follows it, sequence number."""
_CHECKSUM: Final = struct.Struct("<I")
_LIFE: Final = struct.Struct(f"{_HEAD}6I3QI{MESSAGE_BYTES}s")
_CLOCK: Final = struct.Struct(f"{_HEAD}2Q2I3Q{len(State)}Q")
_COUNTERS: Final = struct.Struct(f"{_HEAD}{len(BUSY_STATES) * (3 + len(STEP_BOUNDS) + 1) + 2}Q")


def _slot_size(form: struct.Struct) -> int:
    return (form.size + 7) // 8 * 8


_LIFE_AT: Final = 16
_CLOCK_AT: Final = _LIFE_AT + 2 * _slot_size(_LIFE)
_COUNTERS_AT: Final = _CLOCK_AT + 2 * _slot_size(_CLOCK)
FILE_BYTES: Final = _COUNTERS_AT + 2 * _slot_size(_COUNTERS)


def worker_state_path(directory: Path, rank: int) -> Path:
    """The file of the worker with `rank` inside its stage."""
    return directory / f"worker-{rank}.state"


def map_anew(path: Path, num_bytes: int, magic: bytes = b"") -> mmap.mmap:
    """A file of zeros behind `magic`, mapped; it appears under its name only when it can be read.

    Raises:
        OSError: the directory isn't there or can't be written to.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with unfinished.open("w+b") as file:
        file.truncate(num_bytes)
        mapped = mmap.mmap(file.fileno(), num_bytes)
    mapped[: len(magic)] = magic
    unfinished.replace(path)
    return mapped


class WorkerStateWriter:
    """Owned by the worker; used by one thread at a time."""

    def __init__(self, path: Path) -> None:
        """Create the file, replacing an earlier one.

        Raises:
            OSError: the directory isn't there or can't be written to.
        """
        mapped = map_anew(path, FILE_BYTES, _MAGIC)
        self._life = _SectionWriter(mapped, _LIFE_AT, _LIFE)
        self._clock = _SectionWriter(mapped, _CLOCK_AT, _CLOCK)
        self._counters = _SectionWriter(mapped, _COUNTERS_AT, _COUNTERS)

    def publish_life(self, life: Life) -> None:
        message = life.message.encode(errors="replace")[:MESSAGE_BYTES]
        held = (life.first_layer, life.end_layer)
        sizes = (life.memory_bytes, life.kv_blocks, life.kv_capacity_tokens)
        self._life.publish(life.pid, life.stage, life.rank, life.phase, *held, *sizes, len(message), message)

    def publish_clock(
        self,
        started_nanoseconds: int,
        since_nanoseconds: int,
        state: State,
        operation: Operation,
        steps: tuple[int, int, int],
        spent_nanoseconds: Sequence[int],
    ) -> None:
        """The fields of `Clock`, passed without building one: this happens a dozen times a step.

        `steps`: begun, done and unfinished requests.
        """
        self._clock.publish(started_nanoseconds, since_nanoseconds, state, operation, *steps, *spent_nanoseconds)

    def publish_counters(self, counters: Counters) -> None:
        buckets = [count for kind in counters.step_seconds for count in kind]
        by_kind = (*counters.steps, *counters.tokens, *counters.busy_nanoseconds)
        self._counters.publish(*by_kind, *buckets, counters.hidden_bytes_sent, counters.kv_tokens)


class _SectionWriter:
    """Writes two slots alternately; the checksum is written last, so a partial write has an invalid one."""

    def __init__(self, mapped: mmap.mmap, at: int, form: struct.Struct) -> None:
        self._map = mapped
        self._view = memoryview(mapped)
        self._form = form
        self._slots = (at, at + _slot_size(form))
        self._sequence = 0

    def publish(self, *values: int | bytes) -> None:
        self._sequence += 1
        begin = self._slots[self._sequence % 2]
        self._form.pack_into(self._map, begin, 0, self._sequence, *values)
        checksum = zlib.crc32(self._view[begin + _CHECKSUM.size : begin + self._form.size])
        _CHECKSUM.pack_into(self._map, begin, checksum)


class WorkerStateReader:
    """Owned by the supervisor; opens the file when it is there, and again when a new worker has replaced it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._map: mmap.mmap | None = None
        self._inode = 0

    def read(self) -> WorkerState | None:
        """What was last published; None before a worker has published all three sections once.

        Raises:
            WorkerStateError: the file isn't one of this version.
        """
        mapped = self._mapped()
        if mapped is None:
            return None
        life = _newest(mapped, _LIFE_AT, _LIFE)
        clock = _newest(mapped, _CLOCK_AT, _CLOCK)
        counters = _newest(mapped, _COUNTERS_AT, _COUNTERS)
        if life is None or clock is None or counters is None:
            return None
        return WorkerState(life=_life(life), clock=_clock(clock), counters=_counters(counters))

    def _mapped(self) -> mmap.mmap | None:
        try:
            if self._map is not None and self._path.stat().st_ino == self._inode:
                return self._map
            with self._path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        except FileNotFoundError:
            return self._map
        except (OSError, ValueError) as error:
            raise WorkerStateError(f"{self._path}: {error}") from error
        if len(mapped) < FILE_BYTES or mapped[: len(_MAGIC)] != _MAGIC:
            raise WorkerStateError(f"{self._path} is not a worker's state of this version ({_MAGIC.decode()})")
        self._map, self._inode = mapped, inode
        return mapped


class WorkerStateError(Exception):
    """The file can't be read as a worker's state."""


def _newest(mapped: mmap.mmap, at: int, form: struct.Struct) -> tuple[Any, ...] | None:
    """The section's newest intact slot. None only before the first publication.

    At most one slot is being written at any time. If the writer is twice as fast as this reader, both slots may be
    torn: then it reads again.

    Raises:
        WorkerStateError: neither slot was intact in any attempt.
    """
    for _ in range(_READ_ATTEMPTS):
        slots = [mapped[begin : begin + form.size] for begin in (at, at + _slot_size(form))]
        read = [form.unpack(slot) for slot in slots]
        whole = [
            (sequence, values)
            for slot, (checksum, sequence, *values) in zip(slots, read, strict=True)
            if sequence and checksum == zlib.crc32(slot[_CHECKSUM.size :])
        ]
        if whole:
            return tuple(max(whole)[1])
        if not all(sequence for _, sequence, *_ in read):
            return None  # one was never written, and the other is being written for the first time
    raise WorkerStateError(f"no whole section at byte {at} in {_READ_ATTEMPTS} readings")


def _life(values: tuple[Any, ...]) -> Life:
    pid, stage, rank, phase, first, end, memory, blocks, capacity, length, message = values
    return Life(
        pid=pid,
        stage=stage,
        rank=rank,
        phase=WorkerPhase(phase),
        first_layer=first,
        end_layer=end,
        memory_bytes=memory,
        kv_blocks=blocks,
        kv_capacity_tokens=capacity,
        message=message[:length].decode(errors="replace"),
    )


def _clock(values: tuple[Any, ...]) -> Clock:
    started, since, state, operation, begun, done, unfinished, *spent = values
    return Clock(
        started_nanoseconds=started,
        since_nanoseconds=since,
        state=State(state),
        operation=Operation(operation),
        steps_begun=begun,
        steps_done=done,
        unfinished_requests=unfinished,
        spent_nanoseconds=tuple(spent),
    )


def _counters(values: tuple[Any, ...]) -> Counters:
    kinds, width = len(BUSY_STATES), len(STEP_BOUNDS) + 1
    buckets = values[3 * kinds : -2]
    return Counters(
        steps=values[:kinds],
        tokens=values[kinds : 2 * kinds],
        busy_nanoseconds=values[2 * kinds : 3 * kinds],
        step_seconds=tuple(buckets[begin : begin + width] for begin in range(0, kinds * width, width)),
        hidden_bytes_sent=values[-2],
        kv_tokens=values[-1],
    )
