"""`make setup` in a checkout of its own: what it refuses, what it builds, what it leaves alone.

The checkout holds the real Makefile and scripts around a project that needs nothing from any index, so pip and venv
are real and no network is used.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from processes.repository_files import ROOT, environment_outside_make

PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "sample"
version = "0"

[project.optional-dependencies]
dev = []

[tool.pytest.ini_options]
timeout = 1
"""
# The least a build backend may be: an editable wheel that holds its metadata and nothing else.
BACKEND = """
import pathlib, zipfile

METADATA = "Metadata-Version: 2.1\\nName: sample\\nVersion: 0\\nProvides-Extra: dev\\n"

def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    name = "sample-0-py3-none-any.whl"
    with zipfile.ZipFile(pathlib.Path(wheel_directory) / name, "w") as wheel:
        wheel.writestr("sample-0.dist-info/METADATA", METADATA)
        wheel.writestr("sample-0.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("sample-0.dist-info/RECORD", "")
    return name

def build_wheel(*args):
    raise NotImplementedError
"""
OLD_PYTHON = """#!/bin/sh
case "$1" in -V) echo "Python 3.9.2" ;; *) exit 1 ;; esac
"""
PYTHON_WITHOUT_VENV = """#!/bin/sh
case "$1,$2" in -V,*) echo "Python 3.12.2" ;; *ensurepip*) exit 1 ;; esac
"""
MAKE_THAT_FAILS = """#!/bin/sh
for argument; do
    case "$argument" in
        --*) ;;
        up) [ "$BROKEN" = serve ] && echo "The capital is Rome." || echo "The capital is Paris."; exit 0 ;;
        *) [ "$argument" != "$BROKEN" ]; exit ;;
    esac
done
"""
TOOLS = ("awk", "cat", "cut", "dirname", "find", "flock", "make", "mkdir", "rm", "sh", "sha256sum")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout under a path with spaces in it."""
    root = tmp_path / "a check out"
    root.mkdir()
    shutil.copy(ROOT / "Makefile", root)
    shutil.copytree(ROOT / "scripts", root / "scripts")
    (root / "pyproject.toml").write_text(PYPROJECT, encoding="utf-8")
    (root / "backend.py").write_text(BACKEND, encoding="utf-8")
    (root / "constraints.txt").write_text("", encoding="utf-8")
    return root


def make_setup(checkout: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = environment_outside_make() | variables
    command = ["make", "setup"]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)


def path_with_only(folder: Path, python3: str | None) -> str:
    """A PATH on which nothing but the tools, and perhaps this `python3`, can be found."""
    folder.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None, f"{tool} is not on this machine"
        (folder / tool).symlink_to(found)
    if python3 is not None:
        (folder / "python3").write_text(python3, encoding="utf-8")
        (folder / "python3").chmod(0o755)
    return str(folder)


@pytest.mark.parametrize(
    ("python3", "sentence"),
    [
        pytest.param(None, "Python 3 is missing", id="missing"),
        pytest.param(OLD_PYTHON, "python3 is Python 3.9.2; Stageline needs Python 3.11 or newer", id="too-old"),
        pytest.param(PYTHON_WITHOUT_VENV, "apt install python3-venv", id="no-venv"),
    ],
)
def test_setup_says_what_the_machine_lacks(checkout: Path, tmp_path: Path, python3: str | None, sentence: str) -> None:
    done = make_setup(checkout, PATH=path_with_only(tmp_path / "bin", python3))
    assert done.returncode != 0
    assert sentence in done.stderr
    assert not (checkout / ".venv").exists()


def test_setup_refuses_an_interpreter_that_is_not_there(checkout: Path) -> None:
    done = make_setup(checkout, PYTHON="python-of-nowhere")
    assert done.returncode != 0
    assert "PYTHON=python-of-nowhere is not a program on this machine" in done.stderr


def test_setup_builds_once_and_again_only_when_its_inputs_change(checkout: Path) -> None:
    first = make_setup(checkout, PYTHON=sys.executable)
    assert first.returncode == 0, first.stderr
    assert "Creating .venv" in first.stdout

    again = make_setup(checkout, PYTHON=sys.executable)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")

    settings = (checkout / "pyproject.toml").read_text(encoding="utf-8").replace("timeout = 1", "timeout = 2")
    (checkout / "pyproject.toml").write_text(settings, encoding="utf-8")
    assert make_setup(checkout, PYTHON=sys.executable).stdout == "", "a tool's settings are no reason to install"

    (checkout / "constraints.txt").write_text("sample==0\n", encoding="utf-8")
    changed = make_setup(checkout, PYTHON=sys.executable)
    assert changed.returncode == 0, changed.stderr
    assert "Installing" in changed.stdout
    assert "Creating" not in changed.stdout


def test_setup_that_failed_starts_over(checkout: Path) -> None:
    """Half an environment is never trusted: what an interrupted run left is thrown away."""
    (checkout / "constraints.txt").write_text("sample==99\n", encoding="utf-8")
    failed = make_setup(checkout, PYTHON=sys.executable)
    assert failed.returncode != 0
    assert "pip could not install the dependencies" in failed.stderr

    leftover = checkout / ".venv" / "half-installed"
    leftover.touch()
    (checkout / "constraints.txt").write_text("", encoding="utf-8")
    mended = make_setup(checkout, PYTHON=sys.executable)
    assert mended.returncode == 0, mended.stderr
    assert "Creating .venv" in mended.stdout
    assert not leftover.exists()
    assert make_setup(checkout, PYTHON=sys.executable).stdout == ""


def test_a_model_that_can_not_be_fetched_beside_the_installation_is_named_and_stops_nothing(checkout: Path) -> None:
    environment = environment_outside_make() | {"PYTHON": sys.executable}
    done = subprocess.run(
        ["sh", "scripts/setup", "model.yaml"],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Fetching the model of model.yaml" in done.stdout
    assert "the model could not be fetched yet: ModuleNotFoundError: " in done.stderr
    again = subprocess.run(
        ["sh", "scripts/setup", "model.yaml"],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (again.returncode, again.stdout) == (0, ""), "what serves it fetches it"


def test_help_is_the_default_target_and_lists_every_target() -> None:
    done = subprocess.run(
        ["make"], cwd=ROOT, env=environment_outside_make(), capture_output=True, text=True, check=True
    )
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = [line.removeprefix(".PHONY: ") for line in makefile.splitlines() if line.startswith(".PHONY: ")]
    assert len(targets) > 5
    missing = [target for target in targets if f"make {target} " not in done.stdout]
    assert missing == [], done.stdout


@pytest.mark.parametrize("broken", ["check", "test", "test-thorough", "test-cluster", "test-vllm", "serve"])
def test_ci_runs_every_gate_and_fails_when_one_does(tmp_path: Path, broken: str) -> None:
    """The real script with a stand-in for make, so that each gate can be made to fail alone."""
    script = tmp_path / ".ci" / "run"
    script.parent.mkdir()
    shutil.copy(ROOT / ".ci" / "run", script)
    assert os.access(script, os.X_OK)
    stand_in = tmp_path / "bin" / "make"
    stand_in.parent.mkdir()
    stand_in.write_text(MAKE_THAT_FAILS, encoding="utf-8")
    stand_in.chmod(0o755)
    environment = os.environ | {"PATH": f"{stand_in.parent}:{os.environ['PATH']}", "BROKEN": broken}
    failed = subprocess.run([str(script)], env=environment, capture_output=True, text=True, check=False)
    assert failed.returncode == 1, failed.stdout
    assert [line.split()[1] for line in failed.stdout.splitlines() if " FAILED after " in line] == [broken]
    assert [line.split()[1] for line in failed.stdout.splitlines() if " after " in line] == [
        "setup",
        "check",
        "size",
        "test",
        "test-thorough",
        "test-cluster",
        "test-vllm",
        "serve",
    ]

    passed = subprocess.run(
        [str(script)], env=environment | {"BROKEN": ""}, capture_output=True, text=True, check=False
    )
    assert passed.returncode == 0, passed.stdout
    assert "NOT CHECKED: the real vLLM" in passed.stdout, "the stand-in made no environment with vLLM"
