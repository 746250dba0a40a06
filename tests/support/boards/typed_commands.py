"""Commands as somebody on call types them: a shell with kubectl and stageline, and a place for the files they make."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cluster.api import wait_until
from cluster.under_test import Cluster

_SECONDS: Final = 240.0
_STAGELINE: Final = f"""#!/bin/sh
# The API server lends no proxy to pods that have loopback addresses.
case $1 in status | top | debug-bundle) set -- "$@" --reach direct ;; esac
exec {sys.executable} -m stageline_cli.main "$@"
"""
_OF_THE_TESTS: Final = ("XDG_STATE_HOME", "CURL_HOME", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
"""Variables that would lead a command elsewhere than to the cluster under test."""


@dataclass(frozen=True)
class Typed:
    """What a command did. `shown` is its output and what it wrote into files; `complaints` is its standard error."""

    command: str
    status: int
    shown: str
    complaints: str

    def __str__(self) -> str:
        return f"{self.command}\n--> {self.status}\n{self.shown[-4000:]}\n--- standard error\n{self.complaints[-4000:]}"


class Terminal:
    """Somebody's shell, logged in to a cluster; `home` is their directory.

    Commands may be typed by several threads at once. The environment is therefore read here, once: pytest changes this
    process's while they run.
    """

    def __init__(self, cluster: Cluster, home: Path) -> None:
        self.home = home
        programs = home / "bin"
        programs.mkdir(parents=True)
        _write_program(programs / "kubectl", f'#!/bin/sh\nexec {cluster.kubectl_command} "$@"\n')
        _write_program(programs / "stageline", _STAGELINE)
        self._environment: Final = _environment(home, programs, cluster.kubeconfig)

    def type(self, command: str, variables: Mapping[str, str]) -> Typed:
        """Run one command in a new directory; a variable that is not set is an error, as is a failure within a pipe."""
        directory = Path(tempfile.mkdtemp(dir=self.home))
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=directory,
            env=self._environment | dict(variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        written = [file.read_text(errors="replace") for file in sorted(directory.iterdir())]
        return Typed(command, done.returncode, "\n".join([done.stdout, *written]).strip(), done.stderr.strip())

    def type_and_interrupt(self, command: str, variables: Mapping[str, str]) -> Typed:
        """Run one command that goes on until it is interrupted, which is when it has shown something."""
        output = Path(tempfile.mkdtemp(dir=self.home)) / "output"
        with output.open("wb") as file:
            process = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", command],
                cwd=output.parent,
                env=self._environment | dict(variables),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            wait_until(command, lambda: output.stat().st_size or process.poll() is not None, _SECONDS)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
            process.wait(timeout=_SECONDS)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return Typed(command, process.returncode, output.read_text(errors="replace").strip(), "")


def _environment(home: Path, programs: Path, kubeconfig: Path) -> dict[str, str]:
    own = {"HOME": str(home), "KUBECONFIG": str(kubeconfig), "PATH": f"{programs}:{os.environ['PATH']}"}
    return {name: value for name, value in os.environ.items() if name not in _OF_THE_TESTS} | own


def _write_program(file: Path, text: str) -> None:
    file.write_text(text)
    file.chmod(0o755)
