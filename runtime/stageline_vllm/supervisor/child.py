"""vLLM as a child process: forwards its log, keeps its first failure message, ends it in a bounded time.

The child stays in the supervisor's process group, so that a node that kills the container kills all of it.
"""

import contextlib
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Final

from stageline_api.telemetry.logs import pass_line_on
from stageline_runtime import bound_child
from stageline_vllm.supervisor.outcome import FirstWords, Forgetting

_vllm = logging.getLogger("stageline_vllm.said_by_vllm")

LAST_LINES_SECONDS: Final = 1.0
"""How long after its end a child's last lines may take; its own children may hold the pipe open for longer."""


class VllmChild:
    def __init__(self, words: Sequence[str], environ: Mapping[str, str], forgetting: Forgetting) -> None:
        """Start it.

        Raises:
            OSError: no process can be made.
        """
        self._process = subprocess.Popen(
            bound_child.bound(words),
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert self._process.stdout is not None, "it was asked for"
        self._words = FirstWords(forgetting)
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), name="vllm log", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit status once it has ended, negative for a signal; its last lines have been read by then."""
        status = self._process.poll()
        if status is not None:
            self._reader.join(LAST_LINES_SECONDS)
        return status

    @property
    def words(self) -> str:
        """The exception it named first; empty where it named none."""
        return self._words.first

    @property
    def last_line(self) -> str:
        return self._words.last

    @property
    def said_worker_died(self) -> bool:
        """Whether it logged that one of its workers had ended unexpectedly."""
        return self._words.worker_died

    @property
    def said_engine_died(self) -> bool:
        """Whether its engine had failed before any of its workers ended."""
        return self._words.engine_died

    @property
    def said_adapter_failed(self) -> bool:
        """Whether it ended the start because of a LoRA adapter."""
        return self._words.adapter_failed

    def starts(self) -> None:
        """It is not ready yet."""
        self._words.look_at_start(time.monotonic())

    def got_ready(self) -> None:
        """What it complained of while it started did no harm."""
        self._words.forget()

    def lives_on(self, steps_done: int) -> None:
        """It still runs, with this many steps done by its worker: errors logged long before were harmless."""
        self._words.look(steps_done, time.monotonic())

    def end(self, grace_seconds: float, others: Iterable[int] = ()) -> None:
        """SIGTERM, then SIGKILL for it and the `others` (process ids of its workers) after the grace period."""
        if self._process.poll() is None and grace_seconds > 0:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_seconds)
        for pid in others:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _read(self, log: IO[bytes]) -> None:
        for line in log:
            pass_line_on(_vllm, line)
            self._words.read(line.decode(errors="replace"))


def is_running(pid: int) -> bool:
    """Whether there is a process of this id that has not ended."""
    return _kernel_state(pid) not in ("", "Z", "X")


def descriptor_of_end(pid: int) -> int | None:
    """Becomes readable once the process has ended, for any process. None: it has ended, or the kernel lacks support."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def is_stopped(pid: int) -> bool:
    """Whether the kernel has it stopped."""
    return _kernel_state(pid) in ("T", "t")


def _kernel_state(pid: int) -> str:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]
