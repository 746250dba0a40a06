"""A run of the tests ends with what it skipped because a program is not installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from boards.backfilled_prometheus import needs_prometheus
from boards.browser import HOW_TO_GET as BROWSER
from boards.promtool import needs_promtool
from processes.repository_files import ROOT
from processes.skipped_for_want import skipped_line

TESTS = """
import pytest

@pytest.mark.parametrize("number", range(2))
@pytest.mark.skipif(True, reason={prometheus!r})
def test_rules(number): ...

@pytest.mark.skipif(True, reason={browser!r})
def test_page(): ...

def test_gpu():
    pytest.skip("a CUDA device is there")

def test_passes(): ...
"""


def reason(mark: pytest.MarkDecorator) -> str:
    return str(mark.kwargs["reason"])


@pytest.mark.parametrize("workers", [pytest.param("0", marks=pytest.mark.soak), "2"])
def test_the_last_line_counts_what_is_missing_and_says_how_to_get_it(tmp_path: Path, workers: str) -> None:
    text = TESTS.format(prometheus=reason(needs_prometheus), browser=BROWSER)
    (tmp_path / "test_some.py").write_text(text, encoding="utf-8")
    support = str(ROOT / "tests" / "support")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "processes.skipped_for_want", "-n", workers, str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": support},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip().splitlines()[-1] == (
        "skipped for want of Prometheus: 2 tests (sh scripts/install-prometheus); "
        "a browser: 1 test (sh scripts/install-browser)"
    )


def test_nothing_is_said_when_nothing_is_missing() -> None:
    assert skipped_line(["a CUDA device is there"]) == ""


def test_every_reason_that_names_a_program_is_known() -> None:
    assert all(skipped_line([reason(mark)]) for mark in (needs_prometheus, needs_promtool))
    assert "a browser" in skipped_line([BROWSER])
