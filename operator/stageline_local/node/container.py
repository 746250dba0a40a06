"""One container as a local process in its own session: start, wait, termination message, kill.

The process group is the container: when the main process has ended, the rest of its group is killed, as in a real
container.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from stageline_local.node import child_exec
from stageline_local.node.pod_status import Terminated

TERMINATION_MESSAGE_LIMIT_BYTES: Final = 4096
LOG_FALLBACK_LIMIT_BYTES: Final = 2048
_FALLBACK_DIR: Final = "/"


@dataclass(frozen=True)
class ContainerCommand:
    """Everything that starts a process; paths are local."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    working_dir: Path | None
    log_file: Path
    termination_file: Path
    falls_back_to_logs: bool = False
    """Whether the end of the log replaces a missing termination message of a failed container."""


class ContainerProcess:
    def __init__(self, process: asyncio.subprocess.Process, command: ContainerCommand, started_at: datetime) -> None:
        self._process = process
        self._command = command
        self.started_at = started_at
        self._node_message = ""
        self._is_over_memory = False

    @classmethod
    async def start(cls, command: ContainerCommand) -> "ContainerProcess":
        """Start the process; its output is appended to the log file."""
        command.log_file.parent.mkdir(parents=True, exist_ok=True)
        command.termination_file.parent.mkdir(parents=True, exist_ok=True)
        command.termination_file.write_bytes(b"")
        wrapper = (sys.executable, "-I", "-S", child_exec.__file__, str(os.getpid()))
        with command.log_file.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *wrapper,
                *command.argv,
                env=dict(command.env),
                cwd=command.working_dir or _FALLBACK_DIR,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return cls(process, command, datetime.now(UTC))

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its process group."""
        return self._process.pid

    async def wait(self) -> Terminated:
        """Wait for the end of the main process, kill the rest of its group, and read its termination message."""
        status = await self._process.wait()
        finished_at = datetime.now(UTC)
        self._signal_group(signal.SIGKILL)
        exit_code = 128 - status if status < 0 else status
        reason = "Completed" if exit_code == 0 else "Error"
        if self._is_over_memory and status == -signal.SIGKILL:
            reason = "OOMKilled"
        message = tail_of(self._command.termination_file, TERMINATION_MESSAGE_LIMIT_BYTES) or self._node_message
        if not message and exit_code != 0 and self._command.falls_back_to_logs:
            message = tail_of(self._command.log_file, LOG_FALLBACK_LIMIT_BYTES)
        return Terminated(exit_code, max(0, -status), reason, message, self.started_at, finished_at)

    async def stop(self, grace_seconds: float, node_message: str = "") -> None:
        """SIGTERM, then SIGKILL to the whole group after the grace period. `wait` returns how it ended.

        `node_message`, the node's reason, replaces a missing termination message.
        """
        if self.has_ended:
            return
        self._node_message = node_message
        if grace_seconds > 0:
            # The kubelet sends SIGTERM only to the first process, which has to forward it.
            self._process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_seconds):
                    await self._process.wait()
        self._signal_group(signal.SIGKILL)

    def kill_now(self) -> None:
        self._signal_group(signal.SIGKILL)

    def kill_over_memory(self) -> None:
        """SIGKILL the whole group, like the kernel when a container exceeds its cgroup's limit."""
        if not self.has_ended:
            self._is_over_memory = True
            self.kill_now()

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    async def run_in_same_environment(self, argv: list[str]) -> int:
        """Exit status of a command run beside the container, for exec probes; killed if the caller is cancelled."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", child_exec.__file__, str(os.getpid())),
            *argv,
            env=dict(self._command.env),
            cwd=self._command.working_dir or _FALLBACK_DIR,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return await process.wait()
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):  # already reaped, but its end is not reported yet
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()


def tail_of(path: Path, limit_bytes: int) -> str:
    """The last `limit_bytes` of the file as text; empty if there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - limit_bytes))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
