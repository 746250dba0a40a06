"""A child process that answers each JSON line on its standard input with one on its standard output.

Each child has its own session, so that Ctrl-C reaches only the benchmark, which then ends each child's whole session.
Children run under `pinned`, so that the kernel ends them if the benchmark is killed.
"""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from stageline_api.errors import UserError

PINNED = (sys.executable, "-m", "stageline_bench.runtime.group.pinned")
LOG_TAIL_LINES = 12
POLL_SECONDS = 0.5


def cores_argument(cores: Sequence[int]) -> str:
    """The argument of `pinned`; no core means any."""
    return ",".join(map(str, cores)) or "any"


class LineProcess:
    """One child; its standard error goes to `log`."""

    def __init__(
        self, name: str, command: Sequence[str], *, cores: Sequence[int], environment: Mapping[str, str], log: Path
    ) -> None:
        self.name = name
        self._log = log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [*PINNED, cores_argument(cores), *command],
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        self._output = b""

    def order(self, line: str) -> None:
        """Send one line.

        Raises:
            UserError: the child has ended; the message contains its last output.
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def answer(self, beside: Sequence["LineProcess"] = ()) -> str:
        """The next line that is a JSON object; other output of libraries is ignored.

        Raises:
            UserError: the child, or one of the processes `beside` it, has ended; the message contains its last output.
        """
        while True:
            line, found, rest = self._output.partition(b"\n")
            if not found:
                self._read_more(beside)
                continue
            self._output = rest
            if line.startswith(b"{"):
                return line.decode()

    def _read_more(self, beside: Sequence["LineProcess"]) -> None:
        assert self.process.stdout is not None
        while not select.select([self.process.stdout], [], [], POLL_SECONDS)[0]:
            for other in beside:
                if other.process.poll() is not None:
                    raise other._ended()
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        if not data:
            raise self._ended()
        self._output += data

    def close_input(self) -> None:
        """No more orders follow."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass

    def end(self, patience_seconds: float = 0.0) -> None:
        """End the child and its descendants, after `patience_seconds` for a normal exit."""
        try:
            self.process.wait(patience_seconds)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            try:
                if stream is not None:
                    stream.close()
            except BrokenPipeError:
                pass

    def _ended(self) -> UserError:
        code = self.process.wait()
        words = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return UserError("\n".join([f"{self.name} ended with status {code}; its last lines:", *words]))
