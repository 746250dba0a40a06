"""The release workflow does what a person can do here, and one version stands everywhere."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from processes.repository_files import ROOT

WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"
PINNED_FILES = (
    "pyproject.toml",
    "CHANGELOG.md",
    "charts/stageline/Chart.yaml",
    "images/runtime/Dockerfile",
    "images/services/Dockerfile",
)


def release(root: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    command = ["sh", str(root / "scripts" / "release"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def steps() -> list[str]:
    """Every command line of the workflow."""
    jobs: dict[str, Any] = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"]
    return [line for job in jobs.values() for step in job["steps"] for line in step.get("run", "").splitlines()]


def test_one_version_stands_everywhere_and_must_be_the_tags() -> None:
    agreed = release(ROOT, "version")
    assert agreed.returncode == 0, agreed.stderr
    version = agreed.stdout.split()[-1]
    assert release(ROOT, "version", f"v{version}").returncode == 0
    other = release(ROOT, "version", "v99.0.0")
    assert (other.returncode, "the tag says 99.0.0" in other.stderr) == (1, True), other.stderr


@pytest.mark.parametrize("file", [name for name in PINNED_FILES if name != "pyproject.toml"])
def test_a_place_that_disagrees_is_named(tmp_path: Path, file: str) -> None:
    for name in (*PINNED_FILES, "scripts/release"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    changed = tmp_path / file
    changed.write_text(changed.read_text(encoding="utf-8").replace("0.1.0", "0.0.9"), encoding="utf-8")
    refused = release(tmp_path, "version")
    assert refused.returncode == 1
    assert file in refused.stderr


def test_the_workflow_runs_targets_and_scripts_of_this_repository() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    made = [line.split()[1] for line in steps() if line.startswith("make ")]
    assert {"check", "test", "test-cluster", "images"} <= set(made)
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in made), made
    for line in steps():
        if line.startswith("sh scripts/"):
            assert (ROOT / line.split()[1]).is_file(), line
    assert {"version", "wheel", "chart"} == {
        line.split()[2] for line in steps() if line.startswith("sh scripts/release")
    }


def test_nothing_is_published_without_a_tag() -> None:
    jobs = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"]
    assert "refs" not in str(jobs["publish"]["env"]["PUSH"])
    assert jobs["publish"]["env"]["PUSH"] == "${{ github.ref_type == 'tag' && '1' || '' }}"
    for step in jobs["publish"]["steps"]:
        if re.search(r"login|gh release", step.get("run", "")):
            assert step["if"] == "github.ref_type == 'tag'", step
