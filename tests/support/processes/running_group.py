"""A real group for tests: one engine and P stage processes on loopback addresses of their own, no planner, no node."""

import json
import os
import secrets
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from processes.fork_server import ForkedProcess, can_fork, fork_server
from stageline_api import env, ports
from stageline_api.endpoints import GroupEndpoint
from stageline_api.engine_http import GenerateRequest, SamplingParams, TokenPrompt
from stageline_api.runtime_config import RuntimeConfig, TlsConfig
from stageline_local.node.addresses import AddressPool

START_SECONDS = 200.0
END_SECONDS = 120.0
ANSWER_SECONDS = 60.0
"""For a page of a process of the group; only one that stands still takes as long."""
STAGE_COMMAND = ("-m", "stageline_cli.main", "stage")
ENGINE_COMMAND = ("-m", "stageline_cli.main", "engine")


@dataclass(slots=True)
class RunningGroup:
    """Processes of one incarnation and how to reach them."""

    directory: Path
    addresses: list[str]
    token: str
    """The plan bus's secret."""
    index: int = 0
    """Which of its model's groups it is."""
    processes: dict[str, "subprocess.Popen[bytes] | ForkedProcess"] = field(default_factory=dict)
    stage_command: tuple[str, ...] = STAGE_COMMAND
    """Arguments of the interpreter that make a stage."""
    engine_command: tuple[str, ...] = ENGINE_COMMAND
    """Those that make the engine."""
    is_fresh: bool = False
    """Whether each process begins with an interpreter of its own, as in a pod, and not as a fork."""
    tls: TlsConfig | None = None
    """Certificates of the group's processes, and of who asks its engine; None: all is in clear."""

    @property
    def url(self) -> str:
        """Base URL of the engine."""
        return f"{'https' if self.tls else 'http'}://{self.addresses[0]}:{ports.ENGINE_HTTP}"

    @property
    def state_url(self) -> str:
        """Where it says how it is."""
        return f"http://{self.addresses[0]}:{ports.ENGINE_STATE}"

    @property
    def endpoint(self) -> GroupEndpoint:
        """How a gateway's endpoints file lists it."""
        tls_name = self.tls.name if self.tls else ""
        return GroupEndpoint(model="tiny", group=self.index, incarnation=1, url=self.url, ready=True, tls_name=tls_name)

    def log(self, name: str) -> str:
        """What a process has written."""
        return (self.directory / f"{name}.log").read_text(errors="replace")

    def last_words(self, name: str) -> dict[str, Any]:
        """The termination message a process left."""
        return dict(json.loads((self.directory / f"{name}.termination").read_text()))

    def wait_ready(self) -> None:
        """Until the engine says so; fails with the logs when a process ends first."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            ended = [name for name, process in self.processes.items() if process.poll() is not None]
            assert not ended, "\n".join(f"{name} ended:\n{self.log(name)}" for name in ended)
            try:
                if page(f"{self.state_url}/readyz").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise AssertionError("not ready in time:\n" + "\n".join(self.log(name) for name in self.processes))

    def generate(self, token_ids: tuple[int, ...], sampling: SamplingParams, request_id: str = "") -> list[int]:
        """Token ids of one completion."""
        request = GenerateRequest(
            request_id=request_id or secrets.token_hex(8), prompt=TokenPrompt(token_ids=token_ids), sampling=sampling
        )
        tokens: list[int] = []
        with (
            httpx.Client(timeout=120.0, verify=self._trust()) as client,
            client.stream(
                "POST",
                f"{self.url}/v1/generate",
                content=request.to_json(),
                extensions={"sni_hostname": self.tls.name} if self.tls else {},
            ) as response,
        ):
            assert response.status_code == 200, response.read().decode()
            for line in filter(None, response.iter_lines()):
                event = json.loads(line)
                tokens += event.get("token_ids", [])
                assert event["type"] != "failed", event
        return tokens

    def generate_all(self, prompts: list[tuple[int, ...]], samplings: list[SamplingParams]) -> list[list[int]]:
        """All completions at once, in the order of the prompts."""
        with ThreadPoolExecutor(max_workers=len(prompts)) as pool:
            return list(pool.map(self.generate, prompts, samplings))

    def generate_at_once(self, prompts: list[tuple[int, ...]], samplings: list[SamplingParams]) -> list[list[int]]:
        """`generate_all`, of which none goes on before all have come: a slow machine would bring them one by one."""
        with ThreadPoolExecutor(max_workers=len(prompts)) as pool:
            with self.standing_still("stage-0"):
                answers = [pool.submit(self.generate, *each) for each in zip(prompts, samplings, strict=True)]
                self.wait_until(lambda: self._num_requests() == len(prompts), "all requests have come")
            return [answer.result() for answer in answers]

    def _num_requests(self) -> int:
        status = self.engine_status()
        return int(status.get("requests_running", 0) + status.get("requests_waiting", 0))

    def wait_ended(self, name: str, timeout_seconds: float = END_SECONDS) -> int:
        """The exit status of a process that is expected to end."""
        return self.processes[name].wait(timeout=timeout_seconds)

    def kill(self, name: str) -> None:
        """End a process the hard way."""
        self.processes[name].send_signal(signal.SIGKILL)

    @contextmanager
    def standing_still(self, name: str) -> Iterator[None]:
        """A process is stopped for the length of the block; nothing gets past it."""
        self.processes[name].send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.processes[name].send_signal(signal.SIGCONT)

    def stage_status(self, stage: int) -> dict[str, Any]:
        """What a stage says about itself; empty while it doesn't answer."""
        return self._json(f"http://{self.addresses[stage]}:{ports.STAGE_HEALTH}/status")

    def engine_status(self) -> dict[str, Any]:
        """What the engine says about the group; empty while it doesn't answer."""
        return self._json(f"{self.state_url}/status")

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_seconds: float = END_SECONDS) -> None:
        """Poll until `condition` holds; fails with every process's state and log."""
        deadline = time.monotonic() + timeout_seconds
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not happen within {timeout_seconds:g} s\n{self.account()}"
            time.sleep(0.02)

    def account(self) -> str:
        """Exit status, termination message and log of every process, for a failed assertion."""
        return "\n".join(
            f"--- {name}: exit status {process.poll()}\n{self.log(name)}" for name, process in self.processes.items()
        )

    def _trust(self) -> ssl.SSLContext | bool:
        return True if self.tls is None else ssl.create_default_context(cafile=Path(self.tls.directory) / "ca.crt")

    @staticmethod
    def _json(url: str) -> dict[str, Any]:
        try:
            return dict(page(url).json())
        except httpx.TransportError:
            return {}

    def stop(self) -> None:
        """End what still runs."""
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
        for process in self.processes.values():
            process.wait(timeout=END_SECONDS)


def page(url: str) -> httpx.Response:
    """What a process of a group answers, however long a busy machine lets it wait."""
    return httpx.get(url, timeout=ANSWER_SECONDS, trust_env=False)


@contextmanager
def running_group(
    directory: Path,
    model_dir: Path,
    stage_count: int,
    *,
    start: bool = True,
    held_back: frozenset[str] = frozenset(),
    stage_command: tuple[str, ...] = STAGE_COMMAND,
    engine_command: tuple[str, ...] = ENGINE_COMMAND,
    index: int = 0,
    is_fresh: bool = False,
    **config: Any,
) -> Iterator[RunningGroup]:
    """Start a group on `model_dir` and wait until it is ready; everything is ended on the way out.

    `start=False` doesn't wait; processes named in `held_back` (`engine`, `stage-1`) aren't started at all. `index` is
    which group of its model it is.
    """
    directory.mkdir(parents=True, exist_ok=True)
    leases = [_addresses().lease() for _ in range(stage_count)]
    addresses = [lease.address for lease in leases]
    group = RunningGroup(
        directory,
        addresses,
        secrets.token_hex(16),
        index,
        stage_command=stage_command,
        engine_command=engine_command,
        is_fresh=is_fresh,
        tls=config.get("tls"),
    )
    settings = RuntimeConfig(
        model_name="test",
        namespace="default",
        served_name="tiny",
        stage_count=stage_count,
        **{"source": f"file://{model_dir}", "cache_dir": str(directory / "cache"), **config},
    )
    (directory / "config.json").write_text(settings.model_dump_json())
    try:
        for name in [*(f"stage-{stage}" for stage in range(stage_count)), "engine"]:
            if name not in held_back:
                start_process(group, name)
        if start:
            group.wait_ready()
        yield group
    finally:
        group.stop()
        for lease in leases:
            lease.release()


@cache
def _addresses() -> AddressPool:
    """One for all groups of this process: others, those of `stageline up` among them, never get one of its leases."""
    return AddressPool()


def start_process(group: RunningGroup, name: str, **changed: str) -> None:
    """Start one container's command as the pod contract has it, but for the variables in `changed`."""
    command, _, index = name.partition("-")
    stage = int(index or "0")
    environment = {
        **os.environ,
        env.CONFIG: str(group.directory / "config.json"),
        env.STAGE_INDEX: str(stage),
        env.STAGE_COUNT: str(len(group.addresses)),
        env.GROUP_INDEX: str(group.index),
        env.INCARNATION: "1",
        env.POD_IP: group.addresses[stage],
        env.MASTER_ADDR: group.addresses[0],
        env.MASTER_PORT: str(ports.RENDEZVOUS),
        env.BUS_TOKEN: group.token,
        env.TERMINATION_PATH: str(group.directory / f"{name}.termination"),
        "OMP_NUM_THREADS": "1",
        **changed,
    }
    arguments = group.stage_command if command == "stage" else group.engine_command
    with (group.directory / f"{name}.log").open("wb") as log:
        if not group.is_fresh and can_fork(environment):
            group.processes[name] = fork_server().start(arguments, environment, log.fileno())
            return
        group.processes[name] = subprocess.Popen(
            [sys.executable, *arguments],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
