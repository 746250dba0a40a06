"""What `make setup` shows while pip downloads and installs, and what becomes of the model that it fetches meanwhile."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from processes.package_index import build_wheel, package_index
from processes.repository_files import ROOT

SCRIPT = ROOT / "scripts" / "pip_progress.py"
SAID_BY_PIP = """\
Collecting torch==2.13.0
Collecting small
Downloading https://index/torch-2.13.0-cp311.whl.metadata (30 kB)
Downloading torch-2.13.0-cp311.whl (530.7 MB)
Progress 0 of 530700000
Progress 265350000 of 530700000
Progress 530700000 of 530700000
Downloading small-1.0-py3-none-any.whl (12 kB)
Progress 12000 of 12000
Installing collected packages: small, torch
""".splitlines()


def progress() -> Any:
    spec = importlib.util.spec_from_file_location("pip_progress", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Progress()


def test_a_person_is_told_what_is_downloaded_how_large_it_is_and_how_far() -> None:
    one, shown, said = progress(), [], []
    for line in SAID_BY_PIP:
        said.append(one.feed(line))
        shown.append(one.line(1))
    assert [each for each in said if each] == [
        "downloading torch-2.13.0-cp311.whl (531 MB)",
        "downloaded 531 MB; installing 2 packages",
    ]
    assert shown[1] == "looking up packages: 2"
    assert shown[5] == "downloading file 1, torch-2.13.0-cp311.whl (265 MB of 531 MB); 265 MB in all"
    assert shown[8] == "downloading file 2, small-1.0-py3-none-any.whl (0.0 MB of 0.0 MB); 531 MB in all"
    assert shown[9] == "installed 1 of 2 packages"


def test_the_real_pip_is_followed_and_its_status_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Downloads to a directory, which changes no environment."""
    (tmp_path / "data").write_bytes(os.urandom(2_000_000))
    wheel = build_wheel(tmp_path, {"data": tmp_path / "data"})
    with package_index(wheel) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        done, failed = (
            subprocess.run(
                [sys.executable, str(SCRIPT), "install", "--no-deps", "--target", str(tmp_path / asked), asked],
                capture_output=True,
                text=True,
                check=False,
            )
            for asked in ("tiny-model", "absent-model")
        )
    assert done.returncode == 0, done.stderr
    assert "downloaded 2 MB; installing 1 packages" in done.stdout, done.stdout
    assert failed.returncode != 0
    assert "absent-model" in failed.stderr
