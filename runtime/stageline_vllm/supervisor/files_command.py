"""`stageline vllm-files`: copies the files of the supervisor and the plugins onto a volume, for an unchanged vLLM
image.

Copies three packages and the metadata of their distribution, in pure Python. Their other imports (pydantic,
msgspec, prometheus-client, python-json-logger) are in every environment that has vLLM, because vLLM needs them too.
"""

import importlib.metadata
import shutil
from pathlib import Path

import click

from stageline_vllm.supervisor.package_path import PACKAGES, package_directory

_LEFT_OUT = shutil.ignore_patterns("__pycache__")


@click.command("vllm-files")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
def vllm_files(directory: Path) -> None:
    """Copy Stageline's packages into DIRECTORY, to be named by PYTHONPATH in a container of vLLM's own image."""
    copy_packages(directory)
    click.echo(f"{directory}: {', '.join(package.__name__ for package in PACKAGES)}", err=True)


def copy_packages(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        source, target = package_directory(package.__name__), directory / package.__name__
        shutil.copytree(source, target, dirs_exist_ok=True, ignore=_LEFT_OUT)
    version = importlib.metadata.version("stageline")
    info = directory / f"stageline-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: stageline\nVersion: {version}\n", encoding="utf-8")
