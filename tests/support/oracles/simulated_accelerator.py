"""A device that isn't there: work queued on its streams runs later, in an order drawn from a seed, on the CPU.

Each stream runs its own work in order and no stream waits for another but by an event, so code that forgets a wait or
uses a buffer too early reads wrong numbers under some seed. `ImmediateAccelerator` runs everything at once instead.
"""

import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

import torch

from oracles.recorded_operations import RecordedOperations
from stageline_runtime.accelerator.protocol import Event, GraphRecorder, Stream

CPU = torch.device("cpu")


class ImmediateEvent:
    """Done when it is made."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def seconds_since(self, earlier: Event) -> float:
        return self.seconds - cast(ImmediateEvent, earlier).seconds


class ImmediateStream:
    """Runs everything where it is queued."""

    def record(self, *, timed: bool = False) -> Event:  # noqa: ARG002 - the protocol's
        return ImmediateEvent()

    def wait_for(self, event: Event) -> None:
        pass

    @contextmanager
    def active(self) -> Iterator[None]:
        yield


class _SimulatedDevice:
    """What is the same whenever its streams run."""

    device = CPU
    num_processors = 8
    main: Stream

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def record(self, *, timed: bool = False) -> Event:
        return self.main.record(timed=timed)

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        target = torch.empty_like(tensor)
        self.fill(target, tensor)
        return target

    def fill(self, target: torch.Tensor, tensor: torch.Tensor) -> None:
        self.copy(target, tensor.clone())

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        target = self.pinned(tuple(tensor.shape), tensor.dtype)
        self.copy(target, tensor)
        return target

    def queues_experts(self, dtype: torch.dtype) -> bool:
        return dtype is torch.bfloat16

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def graph_recorder(self) -> GraphRecorder:
        return RecordedOperations()

    def available_bytes(self) -> int:
        return 1 << 34

    def allocated_bytes(self) -> int:
        return 0

    def peak_bytes(self, work: Callable[[], None]) -> int:
        work()
        return 1 << 20

    def identity(self) -> str:
        return "simulated"


class ImmediateAccelerator(_SimulatedDevice):
    """The CPU as a device."""

    def __init__(self) -> None:
        self.main: Stream = ImmediateStream()

    def side_stream(self) -> Stream:
        return ImmediateStream()

    def synchronize(self) -> None:
        pass


class LateEvent:
    """Done after some looks, or when somebody waits; a device gets there some time, though nobody looks."""

    LATEST_SECONDS = 0.5

    def __init__(self, looks: int, seconds: float) -> None:
        self.looks = looks
        self.seconds = seconds
        self._latest = time.monotonic() + self.LATEST_SECONDS

    def is_done(self) -> bool:
        self.looks -= 1
        return self.looks < 0 or time.monotonic() > self._latest

    def wait(self) -> None:
        self.looks = 0

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, LateEvent)
        return self.seconds - earlier.seconds


class LateStream(ImmediateStream):
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._seconds = 0.0

    def record(self, *, timed: bool = False) -> Event:  # noqa: ARG002 - the protocol's
        self._seconds += 1e-9
        return LateEvent(self._random.randrange(6), self._seconds)


class LateAccelerator(ImmediateAccelerator):
    """Computes at once, but says so late."""

    def __init__(self, seed: int, name: str = "simulated") -> None:
        super().__init__()
        self.main = LateStream(seed)
        self._name = name

    def identity(self) -> str:
        return self._name


Task = Callable[[], bool]
"""Does a piece of work and says True, or says False when it can't begin yet."""


@dataclass(eq=False)
class SimulatedEvent:
    """Done once its stream has come to it."""

    machine: "SimulatedAccelerator"
    reached: bool = False
    seconds: float = 0.0

    def is_done(self) -> bool:
        self.machine.run_some()
        return self.reached

    def wait(self) -> None:
        self.machine.run_until(lambda: self.reached)

    def seconds_since(self, earlier: Event) -> float:
        assert self.reached
        return self.seconds - cast(SimulatedEvent, earlier).seconds


@dataclass(eq=False)
class SimulatedStream:
    """Work in order, done when the machine gets round to it."""

    machine: "SimulatedAccelerator"
    tasks: deque[Task] = field(default_factory=deque)

    def record(self, *, timed: bool = False) -> Event:  # noqa: ARG002 - the protocol's
        event = SimulatedEvent(self.machine)

        def reach() -> bool:
            event.reached, event.seconds = True, self.machine.now()
            return True

        self.tasks.append(reach)
        return event

    def wait_for(self, event: Event) -> None:
        awaited = cast(SimulatedEvent, event)
        self.tasks.append(lambda: awaited.reached)

    @contextmanager
    def active(self) -> Iterator[None]:
        before, self.machine.current = self.machine.current, self
        try:
            yield
        finally:
            self.machine.current = before

    def queue(self, work: Callable[[], object]) -> None:
        """Work that can begin at any time."""
        self.tasks.append(lambda: (work(), True)[1])


class SimulatedAccelerator(_SimulatedDevice):
    """Streams whose work runs when somebody waits or asks, in a drawn order. One thread only."""

    def __init__(self, seed: int, beside: "SimulatedAccelerator | None" = None) -> None:
        """`beside` another device: their streams run in one drawn order."""
        self._random = random.Random(seed)
        self.streams: list[SimulatedStream] = [] if beside is None else beside.streams
        self.main: Stream = self.side_stream()
        self.current = cast(SimulatedStream, self.main)
        self._steps = 0
        self._is_unfair = seed % 2 == 0
        self._rank = self._random.sample(range(16), 16)

    def now(self) -> float:
        return self._steps * 0.001

    def side_stream(self) -> Stream:
        stream = SimulatedStream(self)
        self.streams.append(stream)
        return stream

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.current.queue(lambda: target.copy_(source))

    def synchronize(self) -> None:
        self.run_until(lambda: not any(stream.tasks for stream in self.streams))

    def run_some(self) -> None:
        """A drawn number of pieces of work."""
        for _ in range(self._random.randrange(4)):
            self.run_one()

    def run_one(self) -> bool:
        """One piece of a drawn stream that can go on; False when none can."""
        self._steps += 1
        ready = [stream for stream in self.streams if stream.tasks]
        self._random.shuffle(ready)
        if self._is_unfair:  # some streams run as far ahead of others as they may
            ready.sort(key=lambda stream: self._rank[self.streams.index(stream)])
        for stream in ready:
            if stream.tasks[0]():
                stream.tasks.popleft()
                return True
        return False

    def run_until(self, condition: Callable[[], bool]) -> None:
        """Go on until it holds; nothing that could go on means that the code under test waits for ever."""
        while not condition():
            assert self.run_one(), f"every stream is stuck: {[len(stream.tasks) for stream in self.streams]} left"
