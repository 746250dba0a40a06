"""One worker's clock, driven by the calls that `state_clock` wraps.

Holds the state that those calls share: the kind of the current step, to which a transfer returns when it ends, and
how changes get their times (`marks`). Outside of a step a transfer isn't counted, because warm-up and compilation
exchange tensors too.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from stageline_vllm.plugin.marks import DeviceMarks, HostMarks, Marks
from stageline_vllm.plugin.scheduled_work import UnfinishedRequests
from stageline_vllm.worker_clock import WorkerClock
from stageline_vllm.worker_state import Operation, State, WorkerPhase

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class _Handle(Protocol):
    def is_completed(self) -> bool: ...

    def wait(self) -> None: ...


class WorkerWatch:
    def __init__(self, clock: WorkerClock, *, is_last_stage: bool, is_asynchronous: bool) -> None:
        """`is_asynchronous`: the scheduler runs ahead, so sampled tokens go from the last stage to the others."""
        self.clock = clock
        self._is_last_stage = is_last_stage
        self._is_asynchronous = is_asynchronous
        self._marks: Marks = HostMarks()
        self._requests = UnfinishedRequests()
        self._kind: State | None = None
        """Kind of the step that runs in `execute_model`; None outside of it."""
        self._sampling: State = State.DECODE
        """Kind of the step that `sample_tokens` belongs to."""
        self._receive = _Transfer(self, State.RECV, Operation.RECEIVE_HIDDEN)
        self._send = _Transfer(self, State.SEND, Operation.SEND_HIDDEN)

    def use_device(self) -> None:
        """The worker computes on a GPU: changes hold from when the device gets there."""
        from torch import cuda

        marks = DeviceMarks(lambda: cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        self._marks = marks
        threading.Thread(target=marks.poll_for_ever, name="stageline-marks", daemon=True).start()

    def note_cache(self, kv_cache_config: Any) -> None:
        """vLLM has settled how much KV cache this worker has."""
        size = sum(tensor.size for tensor in kv_cache_config.kv_cache_tensors)
        blocks = kv_cache_config.num_blocks
        groups = kv_cache_config.kv_cache_groups
        tokens = blocks * min((group.kv_cache_spec.block_size for group in groups), default=0)
        life = self.clock.life
        held = life.memory_bytes + size
        self.clock.live(replace(life, memory_bytes=held, kv_blocks=blocks, kv_capacity_tokens=tokens))

    @contextmanager
    def living(self, phase: WorkerPhase, operation: Operation) -> Iterator[None]:
        """A call before the worker serves; its time is idle, as the worker has no requests yet."""
        self.clock.enter_phase(phase)
        self.clock.enter(State.IDLE, operation)
        yield
        self.clock.enter(State.IDLE)

    def begin(self, scheduler_output: "SchedulerOutput") -> None:
        """`execute_model` begins."""
        work = self._requests.take(scheduler_output)
        unfinished, kv_tokens = len(self._requests), self._requests.kv_tokens
        self._kind = kind = work.kind
        clock = self.clock

        def change(at: int | None) -> None:
            if kind is None:
                clock.note_unfinished(unfinished, kv_tokens)
                clock.enter(State.HOST, Operation.NONE, at)
            else:
                clock.note_kv_tokens(kv_tokens)
                clock.begin_step(kind, rows=work.rows, tokens=work.tokens, unfinished_requests=unfinished)
                clock.enter(kind, Operation.FORWARD, at)

        self._marks.make(change)

    def executed(self) -> None:
        """`execute_model` has returned; a step with tokens continues in `sample_tokens`."""
        kind, self._kind = self._kind, None
        if kind is None:
            self._marks.make(self.clock.wait_for_scheduler)
        else:
            self._sampling = kind
            self._enter(State.HOST)

    def sample(self) -> None:
        """`sample_tokens` begins, which every stage is called with and only the last one computes in."""
        if self._is_last_stage:
            self._enter(self._sampling, Operation.SAMPLE)
        elif self._is_asynchronous:
            self._enter(State.FEEDBACK)

    def sampled(self) -> None:
        """The step is done with."""
        self._marks.make(self.clock.wait_for_scheduler)

    def receiving(self) -> "_Transfer":
        return self._receive

    def sending(self) -> "_Transfer":
        return self._send

    def sent(self, tensor_dict: dict[str, Any], handles: list[_Handle]) -> list[_Handle]:
        """Count the bytes sent; the returned handles report when they are waited for."""
        if self._kind is None:
            return handles
        tensors = [value for value in tensor_dict.values() if hasattr(value, "element_size")]
        self.clock.note_sent(sum(one.numel() * one.element_size() for one in tensors))
        return [_TimedHandle(handle, self) for handle in handles]

    def in_transfer(self, state: State, operation: Operation) -> None:
        """A transfer begins; outside of a step it isn't counted."""
        if self._kind is not None:
            self._enter(state, operation)

    def in_forward(self) -> None:
        """The transfer has ended."""
        if self._kind is not None:
            self._enter(self._kind, Operation.FORWARD)

    def _enter(self, state: State, operation: Operation = Operation.NONE) -> None:
        self._marks.make(lambda at: self.clock.enter(state, operation, at))


class _Transfer:
    """Entered for the time of a call; kept, because it happens several times a step."""

    def __init__(self, watch: WorkerWatch, state: State, operation: Operation) -> None:
        self._watch, self._state, self._operation = watch, state, operation

    def __enter__(self) -> None:
        self._watch.in_transfer(self._state, self._operation)

    def __exit__(self, kind: object, _error: object, _trace: object) -> None:
        """After an exception the worker stays in the operation that failed."""
        if kind is None:
            self._watch.in_forward()


class _TimedHandle:
    """A transfer in flight; the time spent waiting for it is counted."""

    def __init__(self, handle: _Handle, watch: WorkerWatch) -> None:
        self._handle = handle
        self._watch = watch

    def is_completed(self) -> bool:
        return self._handle.is_completed()

    def wait(self) -> None:
        if self._handle.is_completed():
            self._handle.wait()  # takes no time, and most sends have long ended by then
            return
        with self._watch.sending():
            self._handle.wait()
