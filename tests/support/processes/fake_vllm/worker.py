"""A worker of the stand-in: loads nothing, computes by sleeping, and writes its state as the plugin in vLLM does.

Worker 0 takes steps from the leader and passes each through the others in turn, over connections that the rendezvous at
the master port made. It treats its peers as vLLM does: one that is gone is logged and told to nobody, and so is an
exception of its own, after which all tokens are wrong ones; only the last stage tells its own.
"""

import json
import os
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from processes.fake_vllm.faults import OUTLIVES, START_SECONDS, STEP_SECONDS, fault_at, log_exception, say, seconds
from stageline_vllm.plugin.last_words import LastWords
from stageline_vllm.step_ring import StepRingWriter, step_ring_path
from stageline_vllm.worker_clock import WorkerClock
from stageline_vllm.worker_state import (
    DIRECTORY_VARIABLE,
    Operation,
    State,
    WorkerPhase,
    WorkerStateWriter,
    worker_state_path,
)

RENDEZVOUS_SECONDS = 600.0


class Worker:
    def __init__(self, rank: int, num_nodes: int, master: tuple[str, int]) -> None:
        self._rank = rank
        self._num_nodes = num_nodes
        self._master = master
        self._step_seconds = seconds(STEP_SECONDS, 0.002)
        directory = Path(os.environ[DIRECTORY_VARIABLE])
        steps = StepRingWriter(step_ring_path(directory, 0))
        writer = WorkerStateWriter(worker_state_path(directory, 0))
        self._clock = WorkerClock(writer, stage=rank, step_done=steps.append)
        self._last_words = LastWords(self._clock) if OUTLIVES not in os.environ else LastWords(self._clock, int)
        self._steps = 0
        self._is_shifted = False

    def load(self, ready: int) -> None:
        """Tell the parent over the pipe `ready` once the model is there; an exception is logged and ends it."""
        self._clock.enter_phase(WorkerPhase.LOADING)
        try:
            with self._last_words.of_call():
                fault_at(self._rank, "load")
        except Exception:
            log_exception("WorkerProc failed to start.")
            sys.exit()
        time.sleep(seconds(START_SECONDS, 0.0))
        cut = [int(each) for each in os.environ.get("VLLM_PP_LAYER_PARTITION", "1").split(",")]
        first = sum(cut[: self._rank])
        life = replace(self._clock.life, first_layer=first, end_layer=first + cut[self._rank], memory_bytes=1 << 20)
        self._clock.live(replace(life, kv_blocks=64, kv_capacity_tokens=64 * 16))
        os.write(ready, b"READY")
        os.close(ready)

    def lead(self, leader: socket.socket) -> None:
        """Worker 0: meet the others once the leader has settled the caches, then pass on each step that it sends."""
        commands = leader.makefile("rw")
        if not commands.readline():
            sys.exit()
        peers = self._gather()
        self._ready()
        print(json.dumps({"ready": True}), file=commands, flush=True)
        for line in commands:
            step = self._execute(json.loads(line))
            if (answer := self._pass_on(peers, step)) is None:
                continue  # the leader is told nothing, and finds out by its own timeout
            self._clock.wait_for_scheduler()
            print(json.dumps(answer), file=commands, flush=True)

    def follow(self) -> None:
        """Workers of the other nodes."""
        connection = self._join()
        self._ready()
        messages = connection.makefile("rw")
        for line in messages:
            step = self._execute(json.loads(line))
            self._clock.wait_for_scheduler()
            print(json.dumps(step), file=messages, flush=True)
        say(f"(Worker_PP{self._rank} pid={os.getpid()}) ERROR RuntimeError: [gloo] Connection closed by peer")
        os._exit(1)

    def _ready(self) -> None:
        self._clock.enter_phase(WorkerPhase.WARMING)
        self._clock.enter_phase(WorkerPhase.READY)
        fault_at(self._rank, "ready")

    def _gather(self) -> dict[int, Any]:
        with socket.create_server((self._master[0], self._master[1])) as server:
            server.settimeout(RENDEZVOUS_SECONDS)
            peers: dict[int, Any] = {}
            while len(peers) < self._num_nodes - 1:
                connection, _ = server.accept()
                messages = connection.makefile("rw")
                peers[int(messages.readline())] = messages
        for messages in peers.values():
            print("go", file=messages, flush=True)
        return peers

    def _join(self) -> socket.socket:
        deadline = time.monotonic() + RENDEZVOUS_SECONDS
        while True:
            try:
                connection = socket.create_connection(self._master)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        connection.sendall(f"{self._rank}\n".encode())
        assert connection.recv(3) == b"go\n"
        return connection

    def _execute(self, step: dict[str, Any]) -> dict[str, Any]:
        """The step as it goes on from here: after an exception, with the hidden states of another one, or failed."""
        try:
            with self._last_words.of_call():
                self._compute(step)
        except Exception as error:
            log_exception("WorkerProc hit an exception.")
            if self._rank == self._num_nodes - 1:
                return step | {"failed": str(error)}
            self._is_shifted = True
        return step | {"shifted": step["shifted"] or self._is_shifted}

    def _compute(self, step: dict[str, Any]) -> None:
        self._steps += 1
        kind = State[step["kind"]]
        self._clock.begin_step(kind, rows=step["rows"], tokens=step["tokens"], unfinished_requests=step["unfinished"])
        if self._rank > 0:
            self._clock.enter(State.RECV, Operation.RECEIVE_HIDDEN)
        self._clock.enter(kind, Operation.FORWARD)
        fault_at(self._rank, f"step{self._steps}")
        time.sleep(self._step_seconds)
        if self._rank == self._num_nodes - 1:
            self._clock.enter(kind, Operation.SAMPLE)
        else:
            self._clock.enter(State.SEND, Operation.SEND_HIDDEN)
            self._clock.note_sent(step["tokens"] * 64)
        self._clock.enter(State.HOST)
        self._clock.note_unfinished(step["left"])
        self._clock.end_step()

    def _pass_on(self, peers: dict[int, Any], step: dict[str, Any]) -> dict[str, Any] | None:
        """What comes out of the last stage; None where a peer is gone."""
        try:
            for rank in range(1, self._num_nodes):
                print(json.dumps(step), file=peers[rank], flush=True)
                if not (answer := peers[rank].readline()):
                    raise ConnectionError
                step = json.loads(answer)
        except OSError:
            say(f"(Worker_PP{self._rank}) RuntimeError: Connection closed by peer")
            return None
        return step


def main() -> None:
    rank, num_nodes, host, port = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    worker = Worker(rank, num_nodes, (host, port))
    worker.load(ready=int(sys.argv[5]))
    if rank == 0:
        worker.lead(socket.socket(fileno=int(sys.argv[6])))
    else:
        worker.follow()


if __name__ == "__main__":
    main()
