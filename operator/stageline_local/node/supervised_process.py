"""A process that must always run (gateway, Prometheus): restarted with exponential back-off when it ends."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from stageline_local.node.container import ContainerCommand, ContainerProcess
from stageline_local.node.pod_status import Terminated

_log = logging.getLogger(__name__)

_FIRST_WAIT_SECONDS: Final = 0.5
_LONGEST_WAIT_SECONDS: Final = 10.0
_STEADY_SECONDS: Final = 30.0
"""After running this long a process restarts with the initial back-off."""


class SupervisedProcess:
    """Keeps one command running until `stop`."""

    def __init__(
        self, name: str, command: ContainerCommand, on_end: Callable[[Terminated], None] = lambda _: None
    ) -> None:
        self._name = name
        self._command = command
        self._on_end = on_end
        self._process: ContainerProcess | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._supervise(), name=self._name)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and not self._process.has_ended else None

    async def stop(self, grace_seconds: float) -> None:
        """End the process without a restart."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._process is not None:
            await self._process.stop(grace_seconds)
            await self._process.wait()

    def kill_now(self) -> None:
        if self._process is not None:
            self._process.kill_now()

    async def _supervise(self) -> None:
        wait_seconds = _FIRST_WAIT_SECONDS
        while True:
            self._process = await ContainerProcess.start(self._command)
            ended = await self._process.wait()
            self._on_end(ended)
            # Not a warning: `on_end` informs the user.
            _log.info("%s exited with status %s; restarting it", self._name, ended.exit_code)
            if (ended.finished_at - ended.started_at).total_seconds() >= _STEADY_SECONDS:
                wait_seconds = _FIRST_WAIT_SECONDS
            await asyncio.sleep(wait_seconds)
            wait_seconds = min(_LONGEST_WAIT_SECONDS, wait_seconds * 2)
