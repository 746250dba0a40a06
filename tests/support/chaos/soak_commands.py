"""The parts of a soak that are other programs, run for longer than usual: the fuzzing tests and 500 models."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[3]
FUZZING: Final = (
    "tests/gateway/openai_api/test_malformed_requests.py",
    "tests/gateway/openai_api/test_openapi.py",
    "tests/gateway/relay/test_many_aborts.py",
)
ABORTS: Final = 10_000
"""In every run of the tests."""
_END_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a part. `left_out` says what it would need."""

    name: str
    status: int = 0
    left_out: str = ""
    log: Path | None = None

    @property
    def is_failure(self) -> bool:
        """Whether it ran and did not succeed."""
        return self.status != 0

    @property
    def line(self) -> str:
        """For the report."""
        if self.left_out:
            return f"{self.name}: left out, {self.left_out}"
        return f"{self.name}: {f'FAILED, exit status {self.status}; see {self.log}' if self.status else 'passed'}"


def fuzz(factor: int, seed: int, directory: Path) -> Outcome:
    """The fuzzing tests, `factor` times as hard as in `make test`, with a seed of their own."""
    effort = {"STAGELINE_FUZZ_FACTOR": factor, "STAGELINE_FUZZ_SEED": seed, "STAGELINE_ABORTS": ABORTS * factor}
    # Their own limits are those of a usual run.
    command = [sys.executable, "-m", "pytest", "-n", "0", "-v", "--timeout", "0", *FUZZING]
    return run(f"fuzz ({factor} times)", command, {name: str(value) for name, value in effort.items()}, directory)


def operator(models: int, directory: Path) -> Outcome:
    """Many models on a real control plane; needs Go."""
    name = f"operator ({models} models)"
    if shutil.which("go") is None:
        return Outcome(name, left_out="Go is not installed: the control plane is built from Go modules")
    program = ROOT / "tests" / "support" / "cluster" / "operator_scale.py"
    command = [sys.executable, str(program), "--models", str(models), "--results", str(directory / "results")]
    return run(name, command, {"PYTHONPATH": str(ROOT / "tests" / "support")}, directory)


def run(name: str, command: list[str], environment: Mapping[str, str], directory: Path) -> Outcome:
    """Run to the end, output to a log and to whoever looks on; nothing of it outlives this."""
    log = directory / f"{name.split()[0]}.log"
    with (
        log.open("wb") as file,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                file.write(line)
                sys.stdout.write(line.decode(errors="replace"))
                sys.stdout.flush()
        except BaseException:
            _end(process)
            raise
        return Outcome(name, process.wait(), log=log)


def _end(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C would, with its children; the hard way after a while."""
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
