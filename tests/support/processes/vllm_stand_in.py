"""The stand-in for vLLM as one node of its own, and an engine core that asks it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from oracles.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, write_tiny_tokenizer
from processes.free_ports import free_port
from stageline_api.engine_http import ModelInfo
from stageline_api.health import Phase
from stageline_runtime.engine.telemetry.metrics import EngineMetrics
from stageline_runtime.guided.json_grammars import JsonGrammars
from stageline_runtime.plan_bus.messages import ToStage
from stageline_vllm.engine.core import VllmCore
from stageline_vllm.engine.generation import VllmServer
from stageline_vllm.serve_words import KEY_MIDDLEWARE, NEEDED_ENVIRONMENT, NEEDED_WORDS
from stageline_vllm.server_key import KEY_VARIABLE, authorization
from stageline_vllm.worker_state import DIRECTORY_VARIABLE

SUPPORT = Path(__file__).parents[1]
HOST = "127.0.0.1"
KEY = "k" * 64
HEADERS = {"authorization": authorization(KEY)}
MAX_NUM_SEQS = 4
MAX_MODEL_LEN = 256
START_SECONDS = 120.0
ADAPTERS = ("pirate",)


def write_model(directory: Path) -> Path:
    """What of a model the stand-in and an engine core read: a config and a tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    write_tiny_tokenizer(directory)
    (directory / "config.json").write_text(f'{{"vocab_size": {VOCAB_SIZE}, "eos_token_id": {EOS_TOKEN_ID}}}')
    return directory


@dataclass
class StandIn:
    model_dir: Path
    port: int
    process: "subprocess.Popen[bytes]"
    log_file: Path

    @property
    def server(self) -> VllmServer:
        eos = frozenset({EOS_TOKEN_ID})
        return VllmServer(HOST, self.port, KEY, eos, JsonGrammars(self.model_dir, VOCAB_SIZE, eos))

    def figure(self, name: str) -> float:
        """One of its own metrics."""
        page = httpx.get(
            f"http://{HOST}:{self.port}/metrics", headers=HEADERS, trust_env=False, timeout=START_SECONDS
        ).text
        return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(f"vllm:{name}{{"))

    def wait_until(self, name: str, value: float) -> None:
        deadline = time.monotonic() + START_SECONDS
        while (found := self.figure(name)) != value:
            assert time.monotonic() < deadline, f"{name} is {found}, not {value}\n{self.log_file.read_text()}"
            time.sleep(0.01)

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(START_SECONDS)

    def core(self, *, max_running: int = MAX_NUM_SEQS, max_waiting: int = 64) -> VllmCore:
        """A core of a group that stands; what it tells its stages goes to `told`."""
        info = ModelInfo(
            served_name="tiny", max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS_TOKEN_ID,)
        )
        core = VllmCore(
            info,
            EngineMetrics("tiny"),
            None,
            self.server,
            max_running=max_running,
            max_waiting=max_waiting,
            adapters=ADAPTERS,
        )
        told: list[ToStage] = []
        core.attach(told.append)
        core.set_phase(Phase.READY)
        return core


@contextmanager
def stand_in(directory: Path, *words: str, environment: Mapping[str, str] | None = None) -> Iterator[StandIn]:
    """A stand-in that answers, for the length of the block."""
    directory.mkdir(parents=True, exist_ok=True)
    model_dir = write_model(directory / "model")
    state_dir = directory / "state"
    state_dir.mkdir(exist_ok=True)
    port = free_port()
    adapters = (f"{name}=/adapters/{name}" for name in ADAPTERS)
    loaded = ("--enable-lora", "--lora-modules", *adapters)
    served = ("--middleware", KEY_MIDDLEWARE, "--max-num-seqs", str(MAX_NUM_SEQS))
    given = (*NEEDED_WORDS, *loaded, *served, "--max-model-len", str(MAX_MODEL_LEN), *words)
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model_dir), "--host", HOST]
    paths = [str(SUPPORT / "processes/fake_vllm/site"), str(SUPPORT), *filter(None, sys.path)]
    log_file = directory / "vllm.log"
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [*command, "--port", str(port), *given],
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(paths), DIRECTORY_VARIABLE: str(state_dir)}
            | NEEDED_ENVIRONMENT
            | {KEY_VARIABLE: KEY}
            | dict(environment or {}),
            stderr=log,
            stdout=log,
            start_new_session=True,
        )
    running = StandIn(model_dir, port, process, log_file)
    try:
        _wait_healthy(running)
        yield running
    finally:
        if process.poll() is None:
            running.kill()


def _wait_healthy(running: StandIn) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        assert running.process.poll() is None, running.log_file.read_text()
        try:
            if httpx.get(f"http://{HOST}:{running.port}/health", headers=HEADERS, trust_env=False).is_success:
                return
        except httpx.TransportError:
            assert time.monotonic() < deadline, running.log_file.read_text()
        time.sleep(0.02)
