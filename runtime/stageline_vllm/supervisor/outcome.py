"""Derives the failure that a pod reports from how its vLLM node ended: class, operation and the first error. Pure.

A failing node logs the cause in one line of a traceback, followed by hundreds of lines of shutdown: from the
workers that lost the first one, from the engine that lost the workers. So the first line that names an exception is
kept. The class is derived from it, from the exit status, from the kernel's kills, and from how far the worker had
come. An exception that the worker itself recorded (`worker_state`) takes precedence over all lines, because it
ended the worker.
"""

import re
import signal
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from stageline_api.failures import ExitCode, FailureClass
from stageline_runtime.termination import RuntimeFailure
from stageline_vllm.worker_state import WorkerPhase

LONGEST_WORDS: Final = 600
_EXCEPTION: Final = re.compile(
    r"(?:^|[\s\]):])((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit)): (\S.*)$"
)
_USAGE: Final = re.compile(r"^(?:vllm serve|api_server\.py|main\.py): error: (.+)$")
_CONSEQUENCES: Final = (
    "Engine core initialization failed",
    "EngineCore encountered an issue",
    "EngineDeadError",
    "EngineGenerateError",
    "WorkerProc initialization failed",
    "Executor failed",
    "Worker failed with error",
    "RPC call to",
    "cancelled",
)
"""Messages of processes that only saw another one fail."""
_ENGINE_DIED: Final = ("EngineDeadError", "EngineCore encountered", "RPC call to")
_WORKER_DIED: Final = "died unexpectedly"
"""Logged by a node about a worker of its own that it did not end itself."""
_ADAPTER_FAILED: Final = "in init_static_loras"
"""A traceback frame: its server loads the configured adapters there, before it answers requests."""
_CONNECTION_LOST: Final = re.compile(
    r"Connection (?:closed|reset|refused)|Broken pipe|gloo.*(?:timed? ?out|closed)|NCCL.*(?:remote|socket|unhandled)"
    r"|DistNetworkError|DistBackendError|recvValueWithTimeout",
    re.IGNORECASE,
)
_OUT_OF_MEMORY: Final = re.compile(
    r"out of memory|OutOfMemory|No available memory for the cache blocks|can't allocate memory|MemoryError"
    r"|larger than the available KV cache memory|KV cache is needed.*larger|not enough (?:free |available )?memory"
    r"|Free memory on device|Available memory on node",
    re.IGNORECASE,
)
_BAD_CONFIG: Final = re.compile(
    r"ValidationError|ArgumentError|unrecognized arguments|is not supported for|does not support|divisible"
    r"|custom code|trust_remote_code",
    re.IGNORECASE,
)
_CUSTOM_CODE: Final = re.compile(r"custom code|trust_remote_code")
_CUSTOM_CODE_RULE: Final = (
    "the model brings code of its own, which vLLM runs only with --trust-remote-code in spec.engine.extraArgs, "
    "and from the directory of a file:// or pvc:// source"
)
_REASON_FOLLOWS: Final = re.compile(r"\d+ validation errors? for \w+$")
"""pydantic describes the error in the next line."""
_PREFIX: Final = re.compile(r"^(?:\([^)]*\)\s*)*(?:ERROR \S+ \S+ \[[^\]]*\]\s*)?")
"""The writing process, and the level, time and place of a log line."""
_NOISE: Final = re.compile(r"^(?:\([^)]*\)\s*)*(?:DEBUG|INFO|WARNING)\b|NCCL (?:INFO|TRACE|WARN)\b")
"""Log levels follow the process names in a line. An error message may contain `NCCL_DEBUG=INFO`."""


@dataclass(frozen=True, slots=True)
class Forgetting:
    """When failure messages count as harmless, once the node was ready.

    A failed step never returns, and vLLM has a bounded number in flight: if more steps than those have completed,
    the messages were harmless. Without requests the node's age decides: a failure ends it within vLLM's own limit
    for a step at the latest.
    """

    steps: int
    seconds: float

    def is_due(self, said: "_Said", steps_done: int, now_seconds: float) -> bool:
        if said.seen is None:
            return False
        steps, at = said.seen
        return steps_done - steps > self.steps or now_seconds - at > self.seconds


@dataclass(slots=True)
class _Said:
    words: str
    seen: tuple[int, float] | None = None
    """Steps done and time at the first check after it was logged."""


MOST_KEPT: Final = 64


class FirstWords:
    """Keeps the first line of a log that names a failure, and the last line of all as a fallback.

    A message that only reports another process's failure names no failure. Messages that prove harmless are
    dropped, and the next one then counts as the first; so one is kept for each interval between two checks. Used by
    a thread that reads and one that checks.
    """

    def __init__(self, forgetting: Forgetting) -> None:
        self._forgetting = forgetting
        self._lock = threading.Lock()
        self._named: deque[_Said] = deque()
        self._last = _Said("")
        self.worker_died = False
        self.engine_died = False
        """Its engine core failed before the node logged that a worker had ended: it ends its workers itself."""
        self.adapter_failed = False
        self._flags_at_start = self._flags()

    @property
    def first(self) -> str:
        with self._lock:
            return self._named[0].words if self._named else ""

    @property
    def last(self) -> str:
        return self._last.words

    def read(self, line: str) -> None:
        """One line of vLLM's log, without its end."""
        text = line.strip()
        if not text or _NOISE.search(text):
            return
        with self._lock:
            self._last = _Said(_PREFIX.sub("", text)[:LONGEST_WORDS])
            self.worker_died = self.worker_died or _WORKER_DIED in text
            self.engine_died = self.engine_died or (not self.worker_died and any(each in text for each in _ENGINE_DIED))
            self.adapter_failed = self.adapter_failed or text.endswith(_ADAPTER_FAILED)
            self._name(text)

    def _name(self, text: str) -> None:
        newest = self._named[-1] if self._named else None
        if newest is not None and _REASON_FOLLOWS.search(newest.words):
            newest.words = f"{newest.words}: {_PREFIX.sub('', text)}"[:LONGEST_WORDS]
            return
        if newest is not None and (newest.seen is None or len(self._named) >= MOST_KEPT):
            return
        words = failure_words(text)
        if words is not None and not any(each in text for each in _CONSEQUENCES):
            self._named.append(_Said(words[:LONGEST_WORDS]))

    def look(self, steps_done: int, now_seconds: float) -> None:
        """The node is ready and lives on, and its worker has done this many steps: forget what did no harm."""
        with self._lock:
            self._see(steps_done, now_seconds)
            while self._named and self._forgetting.is_due(self._named[0], steps_done, now_seconds):
                self._named.popleft()
            if self._forgetting.is_due(self._last, steps_done, now_seconds):
                self._last = _Said("")

    def look_at_start(self, now_seconds: float) -> None:
        """The node is not ready yet: messages logged so far are harmless if it becomes ready."""
        with self._lock:
            self._see(0, now_seconds)
            self._flags_at_start = self._flags()

    def forget(self) -> None:
        """The node is ready: drop messages from before the last check that saw it not ready.

        Later messages may be the cause of its end: a worker may become ready and lose a peer between two checks.
        """
        with self._lock:
            self._named = deque(said for said in self._named if said.seen is None)
            self._last = self._last if self._last.seen is None else _Said("")
            new = [now and not before for now, before in zip(self._flags(), self._flags_at_start, strict=True)]
            self.worker_died, self.engine_died, self.adapter_failed = new

    def _see(self, steps_done: int, now_seconds: float) -> None:
        for said in (*self._named, self._last):
            said.seen = said.seen or (steps_done, now_seconds)

    def _flags(self) -> tuple[bool, bool, bool]:
        return self.worker_died, self.engine_died, self.adapter_failed


def failure_words(line: str) -> str | None:
    """The exception that a line names, as in `ValueError: …`; None for any other line."""
    if (usage := _USAGE.search(line)) is not None:
        return f"vllm serve: {usage[1]}"
    if (found := _EXCEPTION.search(line)) is None:
        return None
    return f"{found[1].rpartition('.')[2]}: {found[2]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFailure:
    """The exception that left a call of a worker, as the worker wrote it down."""

    worker: str
    """Which one, for people."""
    words: str
    phase: WorkerPhase


def first_of(failures: Sequence[WorkerFailure]) -> WorkerFailure | None:
    """The worker of a stage that failed first: one with a message that isn't about a lost peer."""
    return min(failures, key=lambda one: _CONNECTION_LOST.search(one.words) is not None, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEnd:
    """The evidence about a node that ended without a request to stop."""

    status: int
    """As `subprocess` has it: negative for a signal."""
    words: str
    """The exception that its log named first; empty where it named none."""
    last_line: str = ""
    phase: WorkerPhase | None
    """How far its worker had come; None where there never was one."""
    failed: WorkerFailure | None = None
    """What a worker of it wrote down."""
    kernel_kills: int = 0
    """Processes of this container that the kernel ended since the start, for want of memory."""
    worker_vanished: bool = False
    """The worker was gone while its node ran: the node was ended for that."""
    engine_died: bool = False
    """The node's engine had failed before, and ended its worker."""
    adapter_failed: bool = False
    """The node could not load a LoRA adapter, and ended its start."""

    @property
    def cause(self) -> str:
        """The exception that ended it; empty where none is known."""
        return self.words if self.failed is None else self.failed.words

    @property
    def reached(self) -> WorkerPhase | None:
        """How far the worker was that ended it."""
        return self.phase if self.failed is None else self.failed.phase

    @property
    def worker_was_killed(self) -> bool:
        return self.worker_vanished and not self.cause and not self.engine_died


def failure_of(end: NodeEnd) -> RuntimeFailure:
    """Why the pod of this node fails."""
    words = end.cause or end.last_line
    if _is_refusal(end) and _CUSTOM_CODE.search(words) is not None:
        words = f"{_CUSTOM_CODE_RULE}: {words}"
    detail = f"{_how(end)}: {words}" if words else _how(end)
    return RuntimeFailure(_class_of(end), detail, operation=_operation(end))


def is_lost_connection(end: NodeEnd) -> bool:
    """Whether the node's own messages show that it ended because a peer was lost; the engine may know which one."""
    return _CONNECTION_LOST.search(end.cause) is not None and _class_of(end) is not FailureClass.OUT_OF_MEMORY


def _how(end: NodeEnd) -> str:
    if end.kernel_kills:
        return "the kernel ended a process of vLLM because memory ran out"
    if end.adapter_failed:
        return "vLLM can't load an adapter of spec.engine.loraAdapters"
    if end.failed is not None:
        return f"{end.failed.worker} failed"
    if end.worker_was_killed:
        return "vLLM's worker was killed"
    if end.engine_died and not end.cause:
        return "vLLM ended its engine and its worker"
    if end.status < 0:
        return f"vLLM was ended by {signal.Signals(-end.status).name}"
    if end.status == 0:
        return "vLLM ended with status 0 without having been told to drain"
    return f"vLLM ended with status {end.status}"


def _class_of(end: NodeEnd) -> FailureClass:
    if end.kernel_kills or _OUT_OF_MEMORY.search(end.cause):
        return FailureClass.OUT_OF_MEMORY
    if end.failed is None and (killed := _class_of_status(end)) is not None:
        return killed
    if _is_refusal(end):
        return FailureClass.BAD_CONFIG
    if end.reached in (WorkerPhase.LOADING, WorkerPhase.WARMING):
        return FailureClass.MODEL_LOAD
    return FailureClass.INTERNAL


def _class_of_status(end: NodeEnd) -> FailureClass | None:
    """The class that the node's exit status alone implies; after a worker's failure it only shows how vLLM reacted."""
    if end.status == 128 + signal.SIGKILL:
        return FailureClass.OUT_OF_MEMORY  # a wrapper's account of a kill from outside; the kernel's is the usual one
    if end.worker_was_killed or end.status == -signal.SIGKILL:
        return FailureClass.KILLED
    return FailureClass.BAD_CONFIG if end.status in (ExitCode.BAD_CONFIG, 2) else None


def _is_refusal(end: NodeEnd) -> bool:
    """vLLM checks its configuration before it starts a worker, and adapters last of all."""
    is_refused = end.reached is None and end.status > 0 and _BAD_CONFIG.search(end.cause) is not None
    return is_refused or end.adapter_failed


def _operation(end: NodeEnd) -> str:
    if end.adapter_failed:
        return "load the LoRA adapters"
    match end.reached:
        case None | WorkerPhase.STARTING:
            return "start vLLM"
        case WorkerPhase.LOADING:
            return "load the model"
        case WorkerPhase.WARMING:
            return "warm up"
        case WorkerPhase.READY:
            return "run vLLM"
