"""A `stageline` command in the test's own process, where an interpreter of its own would show nothing more."""

import io
import subprocess
from contextlib import redirect_stderr, redirect_stdout

from stageline_cli.main import run


def stageline_here(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run one command to its end: its exit status and what it says."""
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(io.StringIO()) as errors:
        status = run(arguments)
    return subprocess.CompletedProcess(arguments, status, output.getvalue(), errors.getvalue())
