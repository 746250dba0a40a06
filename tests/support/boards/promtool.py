"""Prometheus' own checker of rules: found on this machine, or its tests are skipped and say how to get it."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

PROMTOOL: Final = shutil.which("promtool")
needs_promtool: Final = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed: sh scripts/install-prometheus"
)
_LONGEST_SECONDS: Final = 120
MORE_MEMORY_FOR_LESS_WORK: Final = {"GOGC": "400"}
"""Go's collector runs a quarter as often: a fifth less CPU time, at 100 MB more for some seconds."""


def promtool(*arguments: str | Path) -> None:
    """Run it; what it found wrong, with expected and actual values, is the failure's text."""
    assert PROMTOOL is not None
    command = [PROMTOOL, *map(str, arguments)]
    environment = os.environ | MORE_MEMORY_FOR_LESS_WORK
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=_LONGEST_SECONDS, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
