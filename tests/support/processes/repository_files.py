"""The repository's own files, for tests that guard how it is laid out and what it says about itself."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGE_FOLDERS = ("operator", "runtime", "bench")


def repository_files() -> list[Path]:
    """Every file that is, or would be, committed: tracked ones and new ones that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    paths = (ROOT / name for name in listed.split("\0") if name)
    return sorted(path for path in paths if path.is_file())


def package_sources() -> list[Path]:
    """Every Python module of the distribution."""
    return [path for folder in PACKAGE_FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def environment_outside_make() -> dict[str, str]:
    """This process's environment without what an outer `make test` passes down to an inner make."""
    return {
        key: value for key, value in os.environ.items() if key not in {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTHON"}
    }
