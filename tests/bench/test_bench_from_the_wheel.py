"""What the wheel holds, and that the benchmark programs run from it: without the repository, its tests or its docs."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from processes.repository_files import ROOT

NOT_SHIPPED = {"board_builder"}


def shipped_packages() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages: list[str] = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    return packages


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages of the wheel and nothing else, as an installation lays them out."""
    site = tmp_path_factory.mktemp("site")
    for package in shipped_packages():
        shutil.copytree(ROOT / package, site / Path(package).name, ignore=shutil.ignore_patterns("__pycache__"))
    return site


def test_the_wheel_holds_every_package_and_nothing_of_the_tests() -> None:
    folders = ("operator", "runtime", "bench", "dashboards")
    packages = {
        str(path.parent.relative_to(ROOT)) for folder in folders for path in ROOT.glob(f"{folder}/*/__init__.py")
    }
    wanted = {package for package in packages if Path(package).name not in NOT_SHIPPED}
    assert set(shipped_packages()) == wanted
    assert "bench/stageline_bench" in wanted


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("stageline_bench.runtime", "pipeline", "--help"), "Markdown page whose table is replaced"),
        (("stageline_bench.gateway", "--help"), "Markdown page whose table is replaced"),
        (("stageline_bench.gpu_check", "--help"), "the page whose table is written anew"),
        (("stageline_bench.runtime", "paced", "--page", "no/page.md"), "'no/page.md' does not exist"),
    ],
    ids=["bench", "gateway", "gpu-check", "a page that is not there"],
)
def test_benchmarks_run_where_there_is_no_repository(
    installed: Path, tmp_path: Path, arguments: tuple[str, ...], shown: str
) -> None:
    ran = subprocess.run(
        [sys.executable, "-P", "-m", *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert shown in " ".join((ran.stdout + ran.stderr).split()), ran
    assert list(tmp_path.iterdir()) == []


def test_vllms_driver_lies_beside_the_command_that_starts_it(installed: Path) -> None:
    program = (
        "from stageline_bench.runtime.command import peers; "
        "print(*(option.default for option in peers.params if option.name == 'driver'))"
    )
    ran = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    driver = Path(ran.stdout.strip())
    assert driver.is_relative_to(installed), ran
    assert driver.is_file()
