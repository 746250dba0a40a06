"""Supervisors with the stand-in for vLLM on loopback addresses of their own, and an engine's end of their plan bus.

The engine is the real `StageGroup` in a thread of the test's process; supervisors, nodes and workers are processes.
"""

import asyncio
import ipaddress
import itertools
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from processes.repository_files import ROOT
from stageline_api import env, ports
from stageline_api.runtime_config import RuntimeConfig, Timeouts
from stageline_local.node.addresses import can_bind
from stageline_runtime.contract import PodContract
from stageline_runtime.engine.group.stage_group import StageGroup
from stageline_runtime.model_facts.model_config import read_model_config, require_sizes
from stageline_runtime.plan_bus.messages import GroupFailed, Pong, Shutdown, ToStage, WorkOutstanding
from stageline_runtime.termination import RuntimeFailure
from stageline_vllm.server_key import authorization, server_key

WAIT_SECONDS = 120.0
FAKE_SITE = ROOT / "tests/support/processes/fake_vllm/site"


def _own_addresses() -> Iterator[str]:
    """Loopback addresses of this process alone, outside of a node's pool: that one passes over an address whose
    rendezvous port is taken, on which a vLLM of somebody else may listen for all addresses, and these groups don't."""
    for host in itertools.count(os.getpid() % 32_768 * 64):
        address = str(ipaddress.ip_address("127.192.0.1") + host % (1 << 21))
        if all(can_bind(address, port) for port in (ports.PLAN_BUS, ports.STAGE_HEALTH, ports.VLLM_HTTP)):
            yield address


_addresses = _own_addresses()


def fake_vllm_path(version_site: Path = FAKE_SITE) -> str:
    """`PYTHONPATH` with which an interpreter takes the stand-in for vLLM."""
    return os.pathsep.join([str(ROOT / "tests/support"), str(version_site)])


def interpreter_with_vllm(directory: Path) -> Path:
    """A Python that finds the stand-in. Not by a variable of the pod: there `/tmp`, where a checkout may lie, is the
    container's own."""
    file = directory / "python-with-vllm"
    path = f'"{fake_vllm_path()}${{PYTHONPATH:+:$PYTHONPATH}}"'
    file.write_text(f'#!/bin/sh\nPYTHONPATH={path} exec "{sys.executable}" "$@"\n')
    file.chmod(0o755)
    return file


@dataclass
class SupervisedGroup:
    """Supervisors by stage, and what the engine's end sees of them."""

    directory: Path
    addresses: list[str]
    contract: PodContract
    processes: dict[int, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    drain_asked_by: list[int] = field(default_factory=list)
    pongs: dict[int, Pong] = field(default_factory=dict)
    """The newest one of each stage."""
    is_formed: threading.Event = field(default_factory=threading.Event)
    failure: RuntimeFailure | None = None
    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    loop: asyncio.AbstractEventLoop | None = None
    group: StageGroup | None = None

    def log(self, stage: int) -> str:
        return (self.directory / f"{stage}.log").read_text(errors="replace")

    def last_words(self, stage: int) -> dict[str, Any]:
        return dict(json.loads((self.directory / f"{stage}.termination").read_text()))

    def wait_formed(self, seconds: float = WAIT_SECONDS) -> None:
        wait_until(
            lambda: self.is_formed.is_set() or self.failure is not None or self._any_ended(), self.explain, seconds
        )
        assert self.is_formed.is_set(), self.explain()

    def wait_end(self, stage: int) -> int:
        """Exit status of one supervisor."""
        try:
            return self.processes[stage].wait(WAIT_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.explain()) from None

    def status(self, stage: int) -> dict[str, Any]:
        url = f"http://{self.addresses[stage]}:{ports.STAGE_HEALTH}/status"
        return dict(httpx.get(url, timeout=WAIT_SECONDS).json())

    def worker_pid(self, stage: int) -> int:
        """Process id of a stage's worker: the child of the node, which is the supervisor's."""
        (node,) = children_of(self.processes[stage].pid)
        wait_until(lambda: bool(children_of(node)), self.explain)
        return children_of(node)[0]

    def generate(self, **sampling: Any) -> httpx.Response:
        """A request to vLLM's server, as the engine's core makes it."""
        url = f"http://{self.addresses[0]}:{ports.VLLM_HTTP}/inference/v1/generate"
        body = {"token_ids": [1, 2, 3], "sampling_params": {"temperature": 0, "ignore_eos": True, **sampling}}
        return httpx.post(url, json=body, headers=self.headers, timeout=WAIT_SECONDS)

    @property
    def headers(self) -> dict[str, str]:
        """What vLLM's server asks for."""
        return {"authorization": authorization(self.key)}

    @property
    def key(self) -> str:
        return server_key(self.contract.bus_token, self.contract.group, self.contract.incarnation)

    def statuses(self, **headers: str) -> dict[str, int]:
        """What vLLM's server answers to each of several questions."""
        base = f"http://{self.addresses[0]}:{ports.VLLM_HTTP}"
        asked = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 1}}
        spoken = {"model": "tiny", "prompt": "Hi", "max_tokens": 1}
        questions: list[tuple[str, str, Any]] = [
            ("POST", "/inference/v1/generate", asked),
            ("POST", "/v1/completions", spoken),
            ("POST", "/invocations", spoken | asked),
            ("POST", "/tokenize", spoken),
            ("OPTIONS", "/v1/completions", None),
            ("GET", "/v1/models", None),
            ("GET", "/metrics", None),
            ("GET", "/health", None),
            ("GET", "/no-such-path", None),
        ]
        with httpx.Client(base_url=base, timeout=WAIT_SECONDS, trust_env=False, headers=headers) as client:
            return {
                f"{method} {path}": client.request(method, path, json=body).status_code
                for method, path, body in questions
            }

    def say(self, message: ToStage) -> None:
        """The engine says something to all stages."""
        assert self.loop is not None
        assert self.group is not None
        group = self.group
        if isinstance(message, Shutdown | GroupFailed):
            self.loop.call_soon_threadsafe(group.expect_closing)
        self.loop.call_soon_threadsafe(group.broadcast, message)

    def work(self, outstanding: bool) -> None:
        self.say(WorkOutstanding(outstanding))

    def explain(self) -> str:
        ended = {stage: process.poll() for stage, process in self.processes.items()}
        logs = "\n".join(f"--- stage {stage}\n{self.log(stage)}" for stage in self.processes)
        return f"exit statuses {ended}, engine: {self.failure}\n{logs}"

    def _any_ended(self) -> bool:
        return any(process.poll() is not None for process in self.processes.values())


def wait_until(condition: Callable[[], bool], explain: Callable[[], str], seconds: float = WAIT_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.02)


def children_of(pid: int) -> list[int]:
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


@contextmanager
def supervised_group(
    directory: Path,
    model_dir: Path,
    *,
    stage_count: int = 2,
    timeouts: Timeouts = Timeouts(),  # noqa: B008 - frozen
    environment: Mapping[str, str] = {},
    site: Path = FAKE_SITE,
    interpreter: Path = Path(sys.executable),
    command: tuple[str, ...] = ("-m", "stageline_vllm.supervisor"),
    **config: Any,
) -> Iterator[SupervisedGroup]:
    """One incarnation: its engine's end listens, its supervisors run. All are ended with the block."""
    addresses = [next(_addresses) for _ in range(stage_count)]
    resolved = RuntimeConfig(
        model_name="tiny", namespace="default", served_name="tiny", source=f"file://{model_dir}",
        cache_dir=str(directory), stage_count=stage_count, engine_name="vllm", timeouts=timeouts, **config,
    )  # fmt: skip
    (directory / "config.json").write_text(resolved.model_dump_json())
    contract = PodContract(
        config=resolved, stage=0, stage_count=stage_count, group=0, incarnation=1, pod_ip=addresses[0],
        master_addr=addresses[0], master_port=ports.RENDEZVOUS, bus_token=secrets.token_hex(8),
    )  # fmt: skip
    group = SupervisedGroup(directory, addresses, contract)
    engine = threading.Thread(target=lambda: asyncio.run(_engine_end(group, model_dir)), daemon=True)
    engine.start()
    try:
        for stage in range(stage_count):
            start_supervisor(group, stage, environment, site=site, interpreter=interpreter, command=command)
        yield group
    finally:
        for process in group.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()
        if group.loop is not None:
            group.loop.call_soon_threadsafe(group.is_over.set)
        engine.join(10)


def start_supervisor(
    group: SupervisedGroup,
    stage: int,
    environment: Mapping[str, str] = {},
    *,
    site: Path = FAKE_SITE,
    interpreter: Path = Path(sys.executable),
    command: tuple[str, ...] = ("-m", "stageline_vllm.supervisor"),
    token: str | None = None,
    name: str | None = None,
) -> "subprocess.Popen[bytes]":
    name = name or str(stage)
    told = {
        env.CONFIG: str(group.directory / "config.json"),
        env.TERMINATION_PATH: str(group.directory / f"{name}.termination"),
        env.STAGE_INDEX: str(stage),
        env.STAGE_COUNT: str(group.contract.stage_count),
        env.GROUP_INDEX: "0",
        env.INCARNATION: "1",
        env.POD_IP: group.addresses[stage],
        env.MASTER_ADDR: group.addresses[0],
        env.BUS_TOKEN: token or group.contract.bus_token,
        "PYTHONPATH": fake_vllm_path(site),
        "PATH": os.environ["PATH"],
    }
    with (group.directory / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [str(interpreter), *command], env={**told, **environment}, stdout=log, stderr=log, start_new_session=True
        )
    if name == str(stage):
        group.processes[stage] = process
    return process


async def _engine_end(group: SupervisedGroup, model_dir: Path) -> None:
    """What the engine does of the group's life: form it, then tell all others when one is lost."""
    model = require_sizes(read_model_config(model_dir))
    stages = StageGroup(
        group.contract,
        model,
        model_dir,
        on_step_done=lambda _: None,
        on_drain_requested=group.drain_asked_by.append,
        on_pong=group.pongs.__setitem__,
    )
    group.group, group.loop = stages, asyncio.get_running_loop()
    with _closing_listeners(group.loop):
        await _form_and_watch(group, stages)
        await group.is_over.wait()
        for connection in tuple(stages._connections.values()):
            connection.close()
        await asyncio.sleep(0)  # asyncio closes a transport in its next turn


async def _form_and_watch(group: SupervisedGroup, stages: StageGroup) -> None:
    over = asyncio.ensure_future(group.is_over.wait())
    try:
        await stages.listen()
        forming = asyncio.ensure_future(stages.form_nodes())
        await asyncio.wait((forming, over), return_when=asyncio.FIRST_COMPLETED)
        if not forming.done():
            forming.cancel()
            return
        forming.result()
        group.is_formed.set()
        await asyncio.wait((stages.failure, over), return_when=asyncio.FIRST_COMPLETED)
        if stages.failure.done():
            raise stages.failure.result()
    except RuntimeFailure as failure:
        group.failure = failure
        stages.expect_closing()
        stages.broadcast(GroupFailed(failure.peer, failure.detail))
    finally:
        over.cancel()


@contextmanager
def _closing_listeners(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """An engine's bus ends with its process; here it has to end with the group."""
    servers: list[asyncio.Server] = []
    create = loop.create_server

    async def create_and_note(*args: Any, **kwargs: Any) -> asyncio.Server:
        servers.append(await create(*args, **kwargs))
        return servers[-1]

    loop.create_server = create_and_note  # type: ignore[method-assign]
    try:
        yield
    finally:
        for server in servers:
            server.close()
