"""One pod on the node: init containers in order, then all containers at once, probes, end.

Under the restart policy Never an ended container stays ended and the others continue, as under the kubelet: the
operator replaces the group. Under Always (a Deployment's pods) it is restarted, with the kubelet's back-off. Every
change is reported by `on_change`.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

from stageline_local.node.container import ContainerCommand, ContainerProcess
from stageline_local.node.container_command import ContainerSetting, build_command, named_ports
from stageline_local.node.memory_limit import keep_to_limit
from stageline_local.node.mounts import MissingObjectError
from stageline_local.node.pod_status import Admission, ContainerRecord, Running, Terminated, Waiting, pod_status
from stageline_local.node.probes import attempt, run_probe

_RETRY_MISSING_OBJECT_SECONDS: Final = 1.0
_FIRST_BACKOFF_SECONDS: Final = 10.0
_LONGEST_BACKOFF_SECONDS: Final = 300.0
_STEADY_SECONDS: Final = 600.0
"""After running this long a container restarts without back-off."""


class PodRunner:
    """Runs one pod's containers; owned by the node."""

    def __init__(
        self, pod: Mapping[str, Any], address: str, setting: ContainerSetting, on_change: Callable[[], None]
    ) -> None:
        self.pod = pod
        self.address = address
        self._setting = setting
        self._on_change = on_change
        self._started_at = datetime.now(UTC)
        self._admission = Admission(admitted=False)
        spec = pod["spec"]
        self._init = {c["name"]: _initial_record(c) for c in spec.get("initContainers", [])}
        self._main = {c["name"]: _initial_record(c) for c in spec["containers"]}
        self._processes: dict[str, ContainerProcess] = {}
        self._life: asyncio.Task[None] | None = None
        self._stopping = False

    def status(self) -> dict[str, Any]:
        main = list(self._main.values())
        return pod_status(self._admission, list(self._init.values()), main, self.address, self._started_at)

    def hold(self, message: str) -> None:
        """Keep the pod Pending as unschedulable, with a sentence that explains why."""
        self._admission = Admission(admitted=False, message=message)
        self._on_change()

    def start(self) -> None:
        self._admission = Admission(admitted=True)
        self._life = asyncio.create_task(self._live(), name=f"pod {self.pod['metadata']['name']}")
        self._on_change()

    @property
    def is_admitted(self) -> bool:
        return self._life is not None

    def pid_of(self, container_name: str) -> int | None:
        process = self._processes.get(container_name)
        return process.pid if process else None

    async def stop(self, grace_seconds: float) -> None:
        """End all containers gracefully, then the pod's task."""
        self._stopping = True
        await asyncio.gather(*(process.stop(grace_seconds) for process in self._processes.values()))
        if self._life is not None:
            self._life.cancel()
            await asyncio.gather(self._life, return_exceptions=True)
        # A container that was just being started is known by now.
        self.kill_now()

    def kill_now(self) -> None:
        for process in self._processes.values():
            process.kill_now()

    async def _live(self) -> None:
        for container in self.pod["spec"].get("initContainers", []):
            if not await self._run_container(container, self._init):
                return
        containers = self.pod["spec"]["containers"]
        async with asyncio.TaskGroup() as group:
            for container in containers:
                group.create_task(self._run_main(container))

    async def _run_main(self, container: Mapping[str, Any]) -> None:
        restarts_in_a_row = 0
        while True:
            await self._run_container(container, self._main)
            record = self._main[container["name"]]
            if self.pod["spec"].get("restartPolicy") != "Always" or not isinstance(record.state, Terminated):
                return
            ran_seconds = (record.state.finished_at - record.state.started_at).total_seconds()
            restarts_in_a_row = 0 if ran_seconds >= _STEADY_SECONDS else restarts_in_a_row + 1
            wait_seconds = restart_wait_seconds(restarts_in_a_row)
            self._set(self._main, record.restarting(record.state, f"starts again in {wait_seconds:g} s"))
            await asyncio.sleep(wait_seconds)

    async def _run_container(self, container: Mapping[str, Any], records: dict[str, ContainerRecord]) -> bool:
        """Run a container to its end; returns whether it succeeded."""
        name = container["name"]
        refusal = self._setting.images.refusal(container["image"])
        if refusal is not None:
            self._set(records, records[name].with_state(Waiting("ErrImagePull", refusal)))
            return False
        process = await self._start_process(container, records)
        if process is None:
            return False
        guards = [
            asyncio.create_task(self._probe(container, process, records)),
            asyncio.create_task(keep_to_limit(container, process)),
        ]
        try:
            ended: Terminated = await process.wait()
        finally:
            for guard in guards:
                guard.cancel()
            await asyncio.gather(*guards, return_exceptions=True)
            if not process.has_ended:
                process.kill_now()
                await process.wait()
            self._processes.pop(name, None)
        self._set(records, records[name].with_state(ended))
        return ended.exit_code == 0

    async def _start_process(
        self, container: Mapping[str, Any], records: dict[str, ContainerRecord]
    ) -> ContainerProcess | None:
        """Start a container; None if it can't be started (see its record) or the pod is being stopped."""
        name = container["name"]
        command = await self._wait_for_command(container, records)
        if command is None or self._stopping:
            return None
        try:
            process = await ContainerProcess.start(command)
        except OSError as error:
            self._set(records, records[name].with_state(Waiting("CreateContainerError", str(error))))
            return None
        self._processes[name] = process
        has_no_startup_probe = "startupProbe" not in container
        is_ready = has_no_startup_probe and "readinessProbe" not in container
        state = Running(process.started_at, process.pid)
        self._set(records, replace(records[name], state=state, started=has_no_startup_probe, ready=is_ready))
        return process

    async def _wait_for_command(
        self, container: Mapping[str, Any], records: dict[str, ContainerRecord]
    ) -> ContainerCommand | None:
        record = records[container["name"]]
        while not self._stopping:
            try:
                return build_command(self.pod, container, self.address, self._setting)
            except MissingObjectError as missing:
                # The kubelet retries too: the object may be created soon.
                self._set(records, record.with_state(Waiting("CreateContainerConfigError", str(missing))))
                await asyncio.sleep(_RETRY_MISSING_OBJECT_SECONDS)
            except (ValueError, OSError) as error:
                self._set(records, record.with_state(Waiting("CreateContainerError", str(error))))
                return None
        return None

    def _set(self, records: dict[str, ContainerRecord], record: ContainerRecord) -> None:
        if records[record.name] != record:
            records[record.name] = record
            self._on_change()

    async def _probe(
        self, container: Mapping[str, Any], process: ContainerProcess, records: dict[str, ContainerRecord]
    ) -> None:
        name, ports = container["name"], named_ports(container)
        grace_seconds = float(self.pod["spec"].get("terminationGracePeriodSeconds", 30))

        async def _end(kind: str, passed: bool, why: str) -> None:
            if not passed:
                sentence = f"{kind} probe failed: {why}"
                await process.stop(grace_seconds, node_message=sentence)

        async def _set_ready(passed: bool, _why: str) -> None:
            self._set(records, _replace_flags(records[name], started=True, ready=passed))

        async def _run(kind: str, on_verdict: Callable[[bool, str], Any], once: bool = False) -> None:
            probe = container[kind]
            await run_probe(
                probe,
                lambda: attempt(probe, self.address, ports, process.run_in_same_environment),
                on_verdict,
                stop_after_first_success=once,
            )

        if "startupProbe" in container:
            await _run("startupProbe", lambda passed, why: _end("startup", passed, why), once=True)
            has_readiness = "readinessProbe" in container
            self._set(records, _replace_flags(records[name], started=True, ready=not has_readiness))
        async with asyncio.TaskGroup() as group:
            if "readinessProbe" in container:
                group.create_task(_run("readinessProbe", _set_ready))
            if "livenessProbe" in container:
                group.create_task(_run("livenessProbe", lambda passed, why: _end("liveness", passed, why)))


def _initial_record(container: Mapping[str, Any]) -> ContainerRecord:
    return ContainerRecord(container["name"], container["image"], Waiting("PodInitializing"))


def _replace_flags(record: ContainerRecord, started: bool, ready: bool) -> ContainerRecord:
    runs = isinstance(record.state, Running)
    return replace(record, started=started and runs, ready=ready and runs)


def restart_wait_seconds(restarts_in_a_row: int) -> float:
    """Back-off before a restart: none before the first, then 10 s, doubling up to 5 min."""
    if restarts_in_a_row <= 1:
        return 0.0
    return float(min(_LONGEST_BACKOFF_SECONDS, _FIRST_BACKOFF_SECONDS * 2 ** (restarts_in_a_row - 2)))
