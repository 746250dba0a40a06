"""A whole session over fake containers: real processes, sockets, probes and plans, and no model."""

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.node_pods import is_alive
from cluster.planned_cluster import tiny_model
from processes.free_ports import free_port
from stageline_api.endpoints import Endpoints, GroupEndpoint
from stageline_api.errors import UserError
from stageline_api.failures import FailureClass, TerminationMessage
from stageline_api.resource.life.status import GroupStatus
from stageline_local.node.images import LocalImages, machine_environment
from stageline_local.session.local_overrides import LOCAL_IMAGE
from stageline_local.session.session import LocalSession, SessionOptions

SUPPORT = Path(__file__).parents[1] / "support"


class SessionFixture:
    """A session whose `stageline` is the fake one."""

    def __init__(self, directory: Path, **spec: Any) -> None:
        (directory / "bin").mkdir()
        (directory / "model").mkdir()
        self.cache = directory / "cache"
        self.cache.mkdir()
        fake = directory / "bin" / "stageline"
        script = str(SUPPORT / "processes" / "fake_stageline.py")
        fake.write_text(f"#!{sys.executable}\nimport runpy\nrunpy.run_path({script!r}, run_name='__main__')\n")
        fake.chmod(0o755)
        env = machine_environment() | {"PATH": f"{directory / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        images = LocalImages(frozenset({LOCAL_IMAGE}), env)
        (directory / "state").mkdir()
        self.options = SessionOptions(directory / "state", "127.0.0.1", free_port(), images=images)
        model = {"source": f"file://{directory / 'model'}", "cache": {"hostPath": str(self.cache)}}
        self.stop = asyncio.Event()
        self.events: list[str] = []
        self.pids: set[int] = set()
        self.told: list[tuple[GroupStatus, GroupEndpoint]] = []
        """What status and gateway's file said of the group, at every change: a phase may be over within a moment."""
        self.serving: asyncio.Task[None] | None = None
        self.session = LocalSession(
            tiny_model(None, False, **{"model": model, "timeouts": {"drainSeconds": 60}} | spec),
            self.options,
            on_change=self.note_change,
            on_event=lambda event: self.events.append(event.message),
        )

    def phase(self) -> str:
        groups = self.session.status.groups
        return groups[0].phase if groups else ""

    def incarnation(self) -> int:
        return self.session.status.groups[0].incarnation

    def note_change(self) -> None:
        groups = self.session.status.groups
        if groups and self.options.endpoints_path.exists():
            endpoints = Endpoints.model_validate_json(self.options.endpoints_path.read_text())
            self.told.append((groups[0], endpoints.groups[0]))

    def note_pids(self) -> None:
        for pod in self.session.node.pods():
            for container in ("prepare", "stage", "engine"):
                pid = self.session.node.pid_of("default", pod["metadata"]["name"], container)
                self.pids |= {pid} if pid is not None else set()
        self.pids |= {self.session.gateway_pid} if self.session.gateway_pid is not None else set()

    async def until(self, holds: Callable[[], Any], seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline or (self.serving is not None and self.serving.done()):
                logs = {str(path): path.read_text()[-2000:] for path in self.options.state_dir.glob("logs/*/*.log")}
                shown = [self.session.status.to_manifest(), self.session.node.pods(), self.events, logs]
                raise AssertionError(json.dumps(shown, indent=1))
            self.note_pids()
            await asyncio.sleep(0.02)


def in_session(directory: Path, body: Callable[[SessionFixture], Awaitable[None]], **spec: Any) -> SessionFixture:
    """Run `body` beside a session, then stop it and wait for its end; afterwards nothing of it may be left."""

    async def _run() -> SessionFixture:
        fixture = SessionFixture(directory, **spec)
        serving = fixture.serving = asyncio.create_task(fixture.session.run(fixture.stop))
        try:
            await body(fixture)
        finally:
            fixture.stop.set()
            await serving
        return fixture

    fixture = asyncio.run(_run())
    left = [pid for pid in fixture.pids if is_alive(pid)]
    assert left == [], f"processes left behind: {left}"
    assert fixture.session.node.pods() == []
    with socket.create_server(("127.0.0.1", fixture.options.port)):
        pass  # the gateway's port is free again
    assert not fixture.options.endpoints_path.exists()
    return fixture


def test_a_model_becomes_ready_serves_and_leaves_nothing_behind(tmp_path: Path) -> None:
    async def body(fixture: SessionFixture) -> None:
        await fixture.until(lambda: fixture.phase() == "Ready")
        async with httpx.AsyncClient(trust_env=False) as client:
            await fixture.until(lambda: fixture.session.gateway_pid is not None)
            deadline = time.monotonic() + 60
            while True:
                try:
                    seen = Endpoints.model_validate_json((await client.get(f"{fixture.options.url}/endpoints")).text)
                    break
                except httpx.HTTPError:
                    assert time.monotonic() < deadline, "the gateway never answered"
                    await asyncio.sleep(0.05)
        address = fixture.session.node.pods()[0]["status"]["podIP"]
        assert [(g.model, g.ready, g.url) for g in seen.groups] == [("tiny", True, f"http://{address}:8000")]
        await fixture.until(lambda: [s.layers for s in fixture.session.status.groups[0].stages] == ["0-9", "10-19"])
        # A busy machine may fail one poll: what stage and engine say is missing then until the next.
        await fixture.until(lambda: fixture.session.readings.generated_tokens == 7)
        await fixture.until(lambda: fixture.session.readings.clock.bubble == pytest.approx(0.25))

    fixture = in_session(tmp_path, body)
    assert (fixture.cache / "drained").read_text() == "yes"
    assert len(fixture.pids) >= 4, fixture.pids


def test_a_killed_stage_is_named_and_its_group_replaced_after_the_back_off(tmp_path: Path) -> None:
    async def body(fixture: SessionFixture) -> None:
        await fixture.until(lambda: fixture.phase() == "Ready")
        pid = fixture.session.node.pid_of("default", "tiny-0-1-1", "stage")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await fixture.until(lambda: fixture.phase() == "Ready" and fixture.incarnation() == 2)
        backing_off, unready = next(told for told in fixture.told if told[0].phase == "BackingOff")
        assert (unready.ready, unready.message) == (False, "restarting after stage 1 failed: Killed")
        until = backing_off.backoff_until
        started = min(pod["status"]["startTime"] for pod in fixture.session.node.pods())
        assert until is not None
        assert started >= until.isoformat(timespec="microseconds").replace("+00:00", "Z")
        failure = fixture.session.status.last_failures[0]
        assert (failure.stage, failure.container, failure.failure_class) == (1, "stage", "Killed")
        assert "stage 1 of group 0 failed: Killed: killed by SIGKILL" in fixture.events

    in_session(tmp_path, body)


def test_a_killed_gateway_comes_back(tmp_path: Path) -> None:
    async def body(fixture: SessionFixture) -> None:
        await fixture.until(lambda: fixture.session.gateway_pid is not None)
        first = fixture.session.gateway_pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await fixture.until(lambda: fixture.session.gateway_pid not in (None, first))

    in_session(tmp_path, body)


def test_a_bad_configuration_ends_degraded_without_a_restart(tmp_path: Path) -> None:
    detail = "parallelism.pipeline is 2, the model has 1 layer"
    words = TerminationMessage(failure_class=FailureClass.BAD_CONFIG, stage=1, detail=detail).model_dump_json()

    async def body(fixture: SessionFixture) -> None:
        (fixture.cache / "crash-1").write_text(f"64\n{words}")
        await fixture.until(lambda: fixture.phase() == "Failed")
        await fixture.until(lambda: not fixture.session.node.pods())
        degraded = next(c for c in fixture.session.status.conditions if c.type == "Degraded")
        assert (degraded.status, degraded.reason) == ("True", "BadConfiguration")
        assert detail in degraded.message
        assert fixture.incarnation() == 1

    in_session(tmp_path, body)


def test_a_spent_budget_ends_degraded_with_the_cause(tmp_path: Path) -> None:
    words = TerminationMessage(failure_class=FailureClass.MODEL_LOAD, stage=0, detail="no such file").model_dump_json()

    async def body(fixture: SessionFixture) -> None:
        (fixture.cache / "crash-0").write_text(f"65\n{words}")
        await fixture.until(lambda: fixture.phase() == "Failed")
        assert fixture.incarnation() == 2
        degraded = next(c for c in fixture.session.status.conditions if c.type == "Degraded")
        assert degraded.reason == "RestartBudgetSpent"
        assert "stage 0 of group 0 failed: ModelLoad: no such file" in degraded.message

    in_session(tmp_path, body, restart={"maxRestarts": 1})


def test_a_pod_the_node_cannot_honour_ends_the_session_with_its_field(tmp_path: Path) -> None:
    async def _run() -> None:
        fixture = SessionFixture(tmp_path, template={"nodeSelector": {"gpu": "yes"}})
        async with asyncio.timeout(120):
            await fixture.session.run(fixture.stop)

    with pytest.raises(UserError, match=r"spec\.nodeSelector\['gpu'\]"):
        asyncio.run(_run())


def test_a_stop_while_starting_leaves_nothing_behind(tmp_path: Path) -> None:
    async def body(fixture: SessionFixture) -> None:
        await fixture.until(lambda: fixture.session.node.pods())
        fixture.note_pids()

    in_session(tmp_path, body)
