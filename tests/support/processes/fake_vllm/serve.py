"""`vllm serve` of the stand-in: a leader with HTTP server, scheduler and worker, or a headless follower with a worker.

It is a real program with real processes and sockets that computes nothing. What it does when something dies is what
vLLM 0.32 was seen to do: a follower whose worker ends says so and ends with status 0, but with 1 where the worker never
got ready; a leader notices the end of its own worker at once and that of another node's only when a step runs into
`VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS`.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from argparse import Namespace
from pathlib import Path
from typing import Any, NoReturn

from processes.fake_vllm.arguments import read_arguments
from processes.fake_vllm.faults import fault_at, log_exception, log_shutdown, say

STEP_TIMEOUT = "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"


def main() -> None:
    if sys.argv[1:2] != ["serve"]:
        sys.exit("usage: vllm serve MODEL …")
    given = read_arguments(sys.argv[2:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if given.headless:
        _follow(given)
    asyncio.run(_lead(given))


def _follow(given: Namespace) -> NoReturn:
    worker, ready = _start_worker(given)
    try:
        if not _gets_ready(ready):
            sys.exit(1)
        worker.wait()
    finally:
        if worker.poll() is None:
            worker.kill()
    say(f"ERROR Worker proc VllmWorker-{given.node_rank} died unexpectedly, shutting down executor.")
    sys.exit(0)


def _start_worker(given: Namespace, connection: socket.socket | None = None) -> "tuple[subprocess.Popen[bytes], int]":
    """The worker, and the end of a pipe by which it says that it is ready."""
    ours, theirs = os.pipe()
    where = (given.node_rank, given.nnodes, given.master_addr or "127.0.0.1", given.master_port)
    passed = [theirs] if connection is None else [theirs, connection.fileno()]
    command = [sys.executable, "-m", "processes.fake_vllm.worker", *map(str, (*where, *passed))]
    worker = subprocess.Popen(command, pass_fds=passed)
    os.close(theirs)
    return worker, ours


def _gets_ready(ready: int) -> bool:
    if os.read(ready, 5):
        return True
    log_shutdown()
    say("Exception: WorkerProc initialization failed due to an exception in a background process.")
    return False


async def _lead(given: Namespace) -> None:
    import uvicorn

    from processes.fake_vllm.http_routes import Routes
    from processes.fake_vllm.scheduling import Scheduler

    config = json.loads((Path(given.model) / "config.json").read_text())
    scheduler = Scheduler(given.max_num_seqs, config["vocab_size"], Path(given.model))
    ours, theirs = socket.socketpair()
    worker, ready = _start_worker(given, theirs)
    theirs.close()
    engine = _Engine(scheduler, worker, ours)
    try:
        if not await asyncio.to_thread(_gets_ready, ready) or not await engine.is_initialized():
            say("RuntimeError: Engine core initialization failed. See root cause above.")
            os._exit(1)
        if given.adapters and not init_static_loras():
            os._exit(1)
        routes = Routes(given, scheduler, lambda: engine.is_dead, _as_list(config.get("eos_token_id")))
        server = uvicorn.Server(
            uvicorn.Config(routes.app(), host=given.host, port=given.port, log_level="warning", lifespan="off")
        )
        serving = asyncio.create_task(server.serve())
        await engine.run()
        await asyncio.sleep(0.2)  # whoever waits for an answer gets an error
        serving.cancel()
    finally:
        worker.kill()
    say("ERROR EngineCore died: RuntimeError: cancelled")
    os._exit(1)


def init_static_loras() -> bool:
    """vLLM's function of this name raises out of its server's start, after what its worker had to say."""
    try:
        fault_at(0, "adapters")
    except ValueError:
        say("(Worker pid=7) ERROR 11-23 08:00:00 [multiproc_executor.py:1063] safetensors_rust.SafetensorError: Error "
            "while deserializing header: header too small")  # fmt: skip
        say(traceback.format_exc())
        log_shutdown()
        return False
    return True


def _as_list(value: Any) -> list[int]:
    return value if isinstance(value, list) else [] if value is None else [value]


class _Engine:
    """Runs steps through the worker until one fails."""

    def __init__(self, scheduler: Any, worker: "subprocess.Popen[bytes]", connection: socket.socket) -> None:
        self._scheduler = scheduler
        self._worker = worker
        self._connection = connection
        self._limit = float(os.environ.get(STEP_TIMEOUT, "300"))
        self.is_dead = False
        self._step = 0

    async def is_initialized(self) -> bool:
        self._reader, self._writer = await asyncio.open_connection(sock=self._connection)
        try:
            fault_at(0, "cache")
        except Exception:
            log_exception("EngineCore failed to start.")
            log_shutdown()
            return False
        self._writer.write(b"go\n")
        return bool(await self._reader.readline())

    async def run(self) -> None:
        """Returns once the engine is dead."""
        watching = asyncio.create_task(asyncio.to_thread(self._worker.wait))
        stepping = asyncio.create_task(self._step_for_ever())
        await asyncio.wait((watching, stepping), return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            say("ERROR Worker proc VllmWorker-0 died unexpectedly, shutting down executor.")
        stepping.cancel()
        self.is_dead = True
        self._scheduler.fail_all()

    async def _step_for_ever(self) -> None:
        scheduler = self._scheduler
        while True:
            rows = scheduler.begin_step()
            if not rows:
                await scheduler.has_work.wait()
                continue
            try:
                async with asyncio.timeout(self._limit):
                    is_shifted = await self._run_step(rows)
            except TimeoutError:
                say("ERROR TimeoutError: RPC call to sample_tokens timed out.")
                return
            except RuntimeError:
                log_exception("EngineCore encountered a fatal error.")
                return
            scheduler.end_step(rows, is_shifted)

    async def _run_step(self, rows: list[Any]) -> bool:
        """Whether the workers took one step's hidden states for another's."""
        self._step += 1
        prefills = [row for row in rows if row.is_prefill]
        kind = "DECODE" if not prefills else "PREFILL" if len(prefills) == len(rows) else "MIXED"
        tokens = sum(row.num_prompt for row in prefills) + len(rows) - len(prefills)
        ending = sum(row.draws + 1 >= row.max_tokens for row in rows)
        unfinished = len(self._scheduler.running) + len(self._scheduler.waiting)
        step = {"step": self._step, "kind": kind, "rows": len(rows), "tokens": tokens, "unfinished": unfinished}
        step |= {"left": unfinished - ending, "shifted": False}
        self._writer.write(json.dumps(step).encode() + b"\n")
        if not (answer := await self._reader.readline()):
            await asyncio.sleep(3600)  # the worker has ended: who waits for its process says so
        step = json.loads(answer)
        if "failed" in step:
            raise RuntimeError(f"Worker failed with error '{step['failed']}', please check the stack trace above")
        return bool(step["shifted"])
