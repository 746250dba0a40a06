"""HTTP servers of one model, as their users start them: `stageline up` with either engine, and vLLM's OpenAI server.

Each starts in its own session and is ended with it. A server is up when it has answered a request.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

from stageline_api import ports
from stageline_api.errors import UserError
from stageline_bench.runtime.group.line_process import PINNED
from stageline_bench.runtime.peers.peer_bench import STAGELINE, VLLM
from stageline_bench.runtime.peers.peer_environment import PEER, vllm_variables
from stageline_local.session.state_file import read_state
from stageline_runtime.metric_names import STAGE_BUSY, STAGE_STEPS
from stageline_runtime.model_facts.model_config import read_model_config

START_SECONDS: Final = 240.0
VLLM_START_SECONDS: Final = 1800.0
"""75 s on an idle machine; it compiles, which takes much longer on a busy one."""
END_SECONDS: Final = 30.0
STAGELINE_VLLM: Final = "stageline-vllm"
"""`stageline up` with `engine.name: vllm`."""
MODEL_NAME: Final = "bench"
MAX_MODEL_LEN: Final = 640
MAX_NUM_SEQS: Final = 64


class Servers:
    """How each server of one model is started."""

    def __init__(self, model_dir: Path, peer_python: Path, directory: Path, *, dtype: str, stages: int) -> None:
        self.model_dir = model_dir
        self.vocab_size = read_model_config(model_dir).vocab_size
        self.dtype = dtype
        self.stages = stages
        self._peer_python = peer_python
        self._directory = directory

    @contextmanager
    def running(self, engine: str) -> Iterator[str]:
        """URL of a server of any of the three that has answered once; it is ended on exit.

        Raises:
            UserError: it ended or did not answer in time; the message contains its last output.
        """
        port = _free_port()
        command, environment = self._vllm(port) if engine == VLLM else self._stageline(port, engine)
        log = self._directory / f"{engine}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*PINNED, "any", *command],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        url = f"http://127.0.0.1:{port}"
        try:
            _wait_for_answer(url, process, log, START_SECONDS if engine == STAGELINE else VLLM_START_SECONDS)
            yield url
        finally:
            _end(process)

    def parameters(self, starts: int) -> dict[str, Any]:
        """Measurement conditions in a result, for every load."""
        return {"peer": PEER, "stages": self.stages, "dtype": self.dtype, "starts": starts}

    def decode_step_seconds(self, engine: str) -> float:
        """Mean compute time of a decode in a running `stageline up`, of its fastest stage.

        Raises:
            UserError: a stage doesn't answer.
        """
        state = read_state(self._directory / f"{engine}-state" / MODEL_NAME)
        addresses = [pod["status"]["podIP"] for pod in state.pods] if state is not None else []
        with httpx.Client(trust_env=False, timeout=60.0) as http:
            try:
                pages = [http.get(f"http://{each}:{ports.STAGE_HEALTH}/metrics").text for each in addresses]
            except httpx.TransportError as error:
                raise UserError(f"a stage of {engine} doesn't answer: {error}") from error
        return min(_decode_seconds(page) for page in pages)

    def _stageline(self, port: int, name: str) -> tuple[Sequence[str], dict[str, str]]:
        """`name` of `STAGELINE` or `STAGELINE_VLLM`."""
        manifest = self._directory / f"{name}.yaml"
        engine: dict[str, object] = {"dtype": self.dtype, "maxModelLen": MAX_MODEL_LEN, "maxNumSeqs": MAX_NUM_SEQS}
        environment: dict[str, str] = {}
        spec: dict[str, object] = {
            "model": {"source": f"file://{self.model_dir}", "servedName": MODEL_NAME},
            "parallelism": {"pipeline": self.stages},
            "engine": engine,
        }
        if name == STAGELINE_VLLM:
            engine |= {"name": "vllm"}
            spec |= {
                "template": {
                    "env": [{"name": each, "value": value} for each, value in self._vllm_environment().items()]
                },
                "timeouts": {"loadSeconds": round(VLLM_START_SECONDS)},
            }
            environment = {"STAGELINE_VLLM_PYTHON": str(self._peer_python.absolute())}
        resource = {"apiVersion": "stageline.dev/v1alpha1", "kind": "PipelineModel", "metadata": {"name": MODEL_NAME}}
        manifest.write_text(yaml.safe_dump({**resource, "spec": spec}), encoding="utf-8")
        places = ["--state-dir", str(self._directory / f"{name}-state"), "--cache", str(self._directory / "cache")]
        serve = [sys.executable, "-m", "stageline_cli.main", "up", str(manifest), "--plain"]
        return [*serve, "--port", str(port), *places], environment

    def _vllm(self, port: int) -> tuple[Sequence[str], dict[str, str]]:
        sizes = ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_NUM_SEQS), "--dtype", self.dtype]
        serve = [str(self._peer_python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model_dir)]
        names = ["--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(port)]
        names.append("--enable-prompt-tokens-details")  # it reports its prefix cache hits, as Stageline does
        pipeline = ["--pipeline-parallel-size", str(self.stages), "--distributed-executor-backend", "mp"]
        cores = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(self.stages)))}
        return [*serve, *names, *sizes, *(pipeline if self.stages > 1 else [])], cores | self._vllm_environment()

    def _vllm_environment(self) -> dict[str, str]:
        """The same for vLLM alone and under Stageline."""
        return {"VLLM_CPU_KVCACHE_SPACE": "2"} | vllm_variables(self._peer_python)


ENGINES: Final = (STAGELINE, VLLM)


def _decode_seconds(page: str) -> float:
    """Busy seconds of a decode, from a stage's metrics."""
    found = {
        family.name: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.labels.get("kind") == "decode" and family.name in (STAGE_BUSY.family, STAGE_STEPS.family)
    }
    return found[STAGE_BUSY.family] / found[STAGE_STEPS.family]


def _wait_for_answer(url: str, process: "subprocess.Popen[bytes]", log: Path, patience_seconds: float) -> None:
    deadline = time.monotonic() + patience_seconds
    body = {"model": MODEL_NAME, "prompt": [100, 101, 102], "max_tokens": 4, "temperature": 0}
    with httpx.Client(trust_env=False, timeout=60.0) as http:
        while True:
            if process.poll() is not None:
                raise UserError(f"{log.stem} ended with status {process.returncode}: {_tail(log)}")
            if time.monotonic() > deadline:
                raise UserError(f"{log.stem} did not answer within {patience_seconds:g} s: {_tail(log)}")
            try:
                if http.post(f"{url}/v1/completions", json=body).status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """SIGINT to the session like Ctrl-C, then SIGKILL."""
    for number, seconds in ((signal.SIGINT, END_SECONDS), (signal.SIGKILL, END_SECONDS)):
        try:
            os.killpg(process.pid, number)
            process.wait(seconds)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:])


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
