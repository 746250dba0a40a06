"""One run of `stageline up`: starts the session, shows its progress until it is ready, serves, ends.

The result is an exit status: 0 if the user ended it or `--once` was answered, else the cause's.
"""

import asyncio
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import httpx

from stageline_api.errors import UserError
from stageline_api.resource.pipeline_model import PipelineModel
from stageline_cli.up.chat_client import answer_prompt
from stageline_cli.up.display import Display
from stageline_cli.up.stage_view import (
    StageRow,
    is_preparing,
    monitor_lines,
    permanent_failure,
    ready_lines,
    restart_lines,
    stage_rows,
    unschedulable_message,
    unstartable_message,
)
from stageline_local.node.container_command import pod_directory_name
from stageline_local.node.pod_status import Terminated
from stageline_local.session.instance import Instance, default_state_root
from stageline_local.session.local_overrides import token_secret
from stageline_local.session.session import LocalSession, SessionOptions
from stageline_local.session.stage_polling import Rates, Readings, rates_between
from stageline_operator.planner.types import GroupPhase, PlannedEvent

_RATES_WINDOW_SECONDS: Final = 2.0
_INTERRUPTED: Final = 130
_TRIES: Final = 3
_NOTE_BYTES: Final = 4096


@dataclass(frozen=True)
class UpOptions:
    once: str | None = None
    max_tokens: int | None = None
    timeout_seconds: float | None = None


class UpRun:
    """Drives one session and reports its progress."""

    def __init__(
        self,
        model: PipelineModel,
        session_options: SessionOptions,
        options: UpOptions,
        instance: Instance,
        display: Display,
    ) -> None:
        self._model = model
        self._session_options = session_options
        self._options = options
        self._instance = instance
        self._display = display
        self._stop = asyncio.Event()
        self._changed = asyncio.Event()
        self._window_start = Readings()
        self._rates_shown: Rates | None = None
        self._gateway_ends = 0
        self._prometheus_ends = 0
        self._was_killed = False

    async def run(self) -> int:
        """Serve until it is stopped; returns the exit status. Raises `UserError` if it can't continue."""
        secret = token_secret(self._model)
        self._session = LocalSession(
            self._model,
            self._session_options,
            () if secret is None else (secret,),
            on_change=self._changed.set,
            on_event=self._say_event,
            on_gateway_end=self._say_gateway_end,
            on_prometheus_end=self._say_prometheus_end,
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)
        serving = asyncio.create_task(self._session.run(self._stop))
        watching = asyncio.create_task(self._watch())
        try:
            await asyncio.wait({serving, watching}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._stop.set()
            await asyncio.gather(serving, return_exceptions=True)
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        if self._was_killed:
            return _INTERRUPTED
        if (error := serving.exception()) is not None:
            raise error
        if not watching.cancelled():
            return watching.result()
        return 0 if self._options.once is None else _INTERRUPTED

    def _on_signal(self) -> None:
        if not self._stop.is_set():
            self._display.say("stopping: answers in progress may finish; press Ctrl-C again to kill everything now")
            self._stop.set()
            return
        self._was_killed = True
        self._session.kill_now()

    async def _watch(self) -> int:
        """Show changes; returns if there is a reason to end."""
        await self._wait_until_ready(self._options.timeout_seconds)
        self._instance.mark_ready()
        if self._options.once is not None:
            await answer_prompt(
                self._session_options.url, self._model.served_name, self._options.once, self._options.max_tokens, _write
            )
            _write("\n")
            return 0
        for line in ready_lines(self._session_options.url, self._model.served_name, self._model.name):
            self._display.say(line)
        for line in monitor_lines(self._session_options.monitor):
            self._display.say(line)
        await self._until(self._stop.is_set)
        return 0

    async def _wait_until_ready(self, seconds: float | None) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._until(self._is_ready)
                await self._wait_for_gateway()
                await self._wait_for_monitor()
        except TimeoutError:
            waiting = [row for row in self._rows() if row.phase != "Ready"]
            where = "; ".join(f"stage {row.stage}: {row.phase} {row.message}".strip() for row in waiting)
            raise UserError(f"not ready within {seconds:g} s ({where or 'gateway'}); see {self._logs_hint()}") from None

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._changed.clear()
            self._show()
            self._raise_if_hopeless()
            await self._changed.wait()
        self._show()

    def _is_ready(self) -> bool:
        return any(group.phase == GroupPhase.READY for group in self._session.status.groups)

    async def _wait_for_gateway(self) -> None:
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=2.0) as client:
            while True:
                try:
                    if (await client.get(f"{self._session_options.url}/readyz")).is_success:
                        return
                except httpx.HTTPError:
                    pass
                if self._gateway_ends >= _TRIES:
                    raise UserError(f"the gateway does not start; see {self._logs_hint()}")
                await asyncio.sleep(0.1)

    async def _wait_for_monitor(self) -> None:
        while not await self._session.watcher.is_ready():
            if self._prometheus_ends >= _TRIES:
                raise UserError(f"Prometheus does not start; see {self._logs_hint()}")
            await asyncio.sleep(0.1)

    def _raise_if_hopeless(self) -> None:
        pods = self._session.node.pods()
        if (refusal := unschedulable_message(pods)) is not None:
            raise UserError(f"{refusal}; close other programs, lower resources.requests, or use a smaller model")
        if (refusal := unstartable_message(pods)) is not None:
            raise UserError(refusal)
        hopeless = permanent_failure(self._session.status)
        if hopeless is not None:
            message, exit_code = hopeless
            raise UserError(
                f"{message}\nsee {self._logs_hint()}, or pack everything: {self._bundle_command()}", exit_code
            )

    def _rows(self) -> list[StageRow]:
        pods = self._session.node.pods()
        notes = {pod["metadata"]["name"]: self._prepare_note(pod) for pod in pods if is_preparing(pod)}
        return stage_rows(self._session.status, pods, self._session.readings, notes)

    def _show(self) -> None:
        latest = self._session.readings
        if latest.at_seconds - self._window_start.at_seconds >= _RATES_WINDOW_SECONDS:
            self._rates_shown = rates_between(self._window_start, latest)
            self._window_start = latest
        self._display.show(self._rows(), self._rates_shown)

    def _prepare_note(self, pod: Mapping[str, Any]) -> str:
        path = self._session_options.state_dir / "logs" / pod_directory_name(pod) / "prepare.log"
        if not path.exists():
            return ""
        lines = path.read_bytes()[-_NOTE_BYTES:].decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def _say_event(self, event: PlannedEvent) -> None:
        self._display.say(event.message)
        if event.type == "Warning":
            for line in restart_lines(self._session.status):
                self._display.say(line)

    def _say_gateway_end(self, ended: Terminated) -> None:
        self._gateway_ends += 1
        log = self._session_options.state_dir / "logs" / "gateway.log"
        self._display.say(f"the gateway exited with status {ended.exit_code} and is restarted; see {log}")

    def _say_prometheus_end(self, ended: Terminated) -> None:
        self._prometheus_ends += 1
        log = self._session_options.state_dir / "logs" / "prometheus.log"
        self._display.say(f"Prometheus exited with status {ended.exit_code} and is restarted; see {log}")

    def _bundle_command(self) -> str:
        """The command that packs logs, termination messages and objects; it also works after the end."""
        root = self._session_options.state_dir.parent
        where = "" if root == default_state_root() else f" --state-dir {root}"
        return f"stageline debug-bundle {self._model.name}{where}"

    def _logs_hint(self) -> str:
        return f"the logs in {self._session_options.state_dir / 'logs'}"


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
