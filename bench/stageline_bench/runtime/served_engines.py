"""Two HTTP servers of one model, as their users start them: `stageline up`, and vLLM's OpenAI server.

Each is started in a session of its own and ended with everything in it. A server is up when it has answered a request.
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
from typing import Final

import httpx
import yaml

from stageline_api.errors import UserError
from stageline_bench.runtime.line_process import PINNED
from stageline_bench.runtime.peers import STAGELINE, VLLM
from stageline_runtime.model_facts.model_config import read_model_config

START_SECONDS: Final = 240.0
END_SECONDS: Final = 30.0
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
        """URL of a server of `STAGELINE` or `VLLM` that has answered once; it is ended on the way out.

        Raises:
            UserError: it ended or did not answer in time; the message holds its last words.
        """
        port = _free_port()
        command, environment = self._stageline(port) if engine == STAGELINE else self._vllm(port)
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
            _wait_for_answer(url, process, log)
            yield url
        finally:
            _end(process)

    def _stageline(self, port: int) -> tuple[Sequence[str], dict[str, str]]:
        manifest = self._directory / "model.yaml"
        engine = {"dtype": self.dtype, "maxModelLen": MAX_MODEL_LEN, "maxNumSeqs": MAX_NUM_SEQS}
        spec = {
            "model": {"source": f"file://{self.model_dir}", "servedName": MODEL_NAME},
            "parallelism": {"pipeline": self.stages},
            "engine": engine,
        }
        resource = {"apiVersion": "stageline.dev/v1alpha1", "kind": "PipelineModel", "metadata": {"name": MODEL_NAME}}
        manifest.write_text(yaml.safe_dump({**resource, "spec": spec}), encoding="utf-8")
        places = ["--state-dir", str(self._directory / "state"), "--cache", str(self._directory / "cache")]
        serve = [sys.executable, "-m", "stageline_cli.main", "up", str(manifest), "--plain"]
        return [*serve, "--port", str(port), *places], {}

    def _vllm(self, port: int) -> tuple[Sequence[str], dict[str, str]]:
        sizes = ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_NUM_SEQS), "--dtype", self.dtype]
        serve = [str(self._peer_python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model_dir)]
        names = ["--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(port)]
        pipeline = ["--pipeline-parallel-size", str(self.stages), "--distributed-executor-backend", "mp"]
        home = self._peer_python.parent.parent / "cache"
        return [*serve, *names, *sizes, *(pipeline if self.stages > 1 else [])], {
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(self.stages))),
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CACHE_ROOT": str(home.resolve()),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }


ENGINES: Final = (STAGELINE, VLLM)


def _wait_for_answer(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    body = {"model": MODEL_NAME, "prompt": [100, 101, 102], "max_tokens": 4, "temperature": 0}
    with httpx.Client(trust_env=False, timeout=60.0) as http:
        while True:
            if process.poll() is not None:
                raise UserError(f"{log.stem} ended with status {process.returncode}: {_tail(log)}")
            if time.monotonic() > deadline:
                raise UserError(f"{log.stem} did not answer within {START_SECONDS:g} s: {_tail(log)}")
            try:
                if http.post(f"{url}/v1/completions", json=body).status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """SIGINT to the session as a person would, then SIGKILL."""
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
