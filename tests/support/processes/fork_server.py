"""Starts stages and engines of tests without importing torch again for each: forks of one process that has imported it.

`python -m processes.fork_server SOCKET` imports what a stage and an engine need, starts no thread, and forks a process
for each request. A fork is a process like any other: pid, signals, sockets, exit status and termination message are its
own, and it ends as an interpreter ends; the ranks of a stage are forks in their turn (`forked_ranks`). What it doesn't
show is that a fresh interpreter gets as far; the tests of the main job and of the command line do.

One server serves one process of pytest (`fork_server()`), over a pair of sockets, and ends all its forks when that
process is gone. Requests and answers are JSON lines; standard output of the fork travels along as a descriptor.
"""

import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

READ_AT_IMPORT: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Variables that libraries read when they are loaded. With more than one thread, loading numpy alone starts some."""
_LONGEST_MESSAGE_BYTES: Final = 1 << 20


class ForkedProcess:
    """A fork, with the part of `subprocess.Popen` that tests use."""

    def __init__(self, server: "ForkServer", pid: int) -> None:
        self._server = server
        self._pidfd = os.pidfd_open(pid)
        self.pid = pid
        self.returncode: int | Any = None
        """As `Popen` has it: None while it runs."""

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        if self.returncode is None and select.select([self._pidfd], [], [], 0)[0]:
            self._ended()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, once it has ended; raises TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._pidfd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or 0.0)
            self._ended()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended: a pid may be another's by then, but this descriptor never is."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """End it the hard way."""
        self.send_signal(signal.SIGKILL)

    def _ended(self) -> None:
        self.returncode = self._server.exit_status(self.pid)
        os.close(self._pidfd)


class ForkServer:
    """The client's side: one server, started when it is first used, ended with this process."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        support = str(Path(__file__).parents[1])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "processes.fork_server", str(theirs.fileno())],
                env=os.environ | READ_AT_IMPORT | {"PYTHONPATH": support},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        atexit.register(self.close)

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], output: int) -> ForkedProcess:
        """Fork a process that does what `python *arguments` would do, writing to the descriptor `output`."""
        job = {"arguments": list(arguments), "environment": dict(environment), "directory": str(Path.cwd())}
        return ForkedProcess(self, self._ask({"start": job}, output)["pid"])

    def exit_status(self, pid: int) -> int:
        """The exit status of a fork that has ended."""
        return int(self._ask({"ended": pid})["status"])

    def close(self) -> None:
        """End the server and what it has forked."""
        self._socket.close()
        self._process.wait()

    def _ask(self, question: Mapping[str, Any], *descriptors: int) -> dict[str, Any]:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(question).encode()], descriptors)
            answer = self._socket.recv(_LONGEST_MESSAGE_BYTES)
        assert answer, "the fork server has ended; its words are in the output of this test run"
        return dict(json.loads(answer))


@cache
def fork_server() -> ForkServer:
    """The one of this process."""
    return ForkServer()


def can_fork(environment: Mapping[str, str]) -> bool:
    """Whether a fork would read the same from these variables as a fresh interpreter."""
    return all(environment.get(name, value) == value for name, value in READ_AT_IMPORT.items())


# The server


@dataclass(frozen=True, slots=True)
class Job:
    """What a fork has to become."""

    arguments: list[str]
    environment: dict[str, str]
    directory: str


def serve(control: socket.socket) -> tuple[Job, int] | None:
    """Fork until the client is gone. Returns in each fork, with its job and output, and in the server with None."""
    children: set[int] = set()
    while True:
        message, descriptors, *_ = socket.recv_fds(control, _LONGEST_MESSAGE_BYTES, 1)
        if not message:
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            return None
        match json.loads(message):
            case {"start": job}:
                # A fork has this thread alone: whatever another one held would stay locked in it for ever.
                assert len(list(Path("/proc/self/task").iterdir())) == 1, "an import has started a thread"
                pid = os.fork()
                if pid == 0:
                    return Job(**job), descriptors[0]
                children.add(pid)
                os.close(descriptors[0])
                answer = {"pid": pid}
            case {"ended": pid}:
                _, status = os.waitpid(pid, 0)
                children.discard(pid)
                answer = {"status": os.waitstatus_to_exitcode(status)}
            case unknown:
                raise ValueError(f"the fork server does not know {unknown!r}")
        control.send(json.dumps(answer).encode())


def become(job: Job, output: int) -> None:
    """Everything in which a fresh interpreter would differ, then what `python *arguments` does."""
    os.chdir(job.directory)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(job.environment)
    # Zone and seeds were set up from the server's environment, once.
    time.tzset()
    sys.path[1:1] = [path for path in job.environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    match job.arguments:
        case ["-m", module, *arguments]:
            sys.argv = [module, *arguments]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case [script, *arguments]:
            sys.argv = [script, *arguments]
            sys.path[0] = str(Path(script).parent)
            runpy.run_path(script, run_name="__main__")
        case nothing:
            raise ValueError(f"no program in {nothing!r}")


def _import_what_they_need() -> None:
    import stageline_runtime.engine.command
    import stageline_runtime.engine.process
    import stageline_runtime.stage.command
    import stageline_runtime.stage.load_stage
    import stageline_runtime.stage.process  # noqa: F401
    from processes import forked_ranks
    from stageline_runtime.stage.ranks import supervisor

    supervisor.start_rank = forked_ranks.start_rank


def main() -> None:
    """Serve; a fork leaves by the way that its program takes."""
    control = socket.socket(fileno=int(sys.argv[1]))
    _import_what_they_need()
    gc.freeze()  # what is shared with all forks is not to be written to by each fork's collector
    forked = serve(control)
    control.close()
    if forked is not None:
        become(*forked)


if __name__ == "__main__":
    main()
