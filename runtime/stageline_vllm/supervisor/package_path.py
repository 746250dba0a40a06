"""Lets vLLM's interpreter import only our packages that it needs, by links in the directory of the plugins.

The supervisor may run in an environment that holds other versions of vLLM's dependencies (torch above all), so that
environment as a whole never goes onto vLLM's path.
"""

from pathlib import Path
from typing import Final

import stageline_api
import stageline_runtime
import stageline_vllm

PACKAGES: Final = (stageline_api, stageline_runtime, stageline_vllm)


def link_packages(directory: Path) -> Path:
    """Link the packages into `directory`, and return it; put it first on vLLM's `PYTHONPATH`."""
    for package in PACKAGES:
        link = directory / package.__name__
        if not link.is_symlink():
            link.symlink_to(package_directory(package.__name__), target_is_directory=True)
    return directory


def package_directory(name: str) -> Path:
    """Directory of one of `PACKAGES`."""
    file = next(package.__file__ for package in PACKAGES if package.__name__ == name)
    assert file is not None, f"{name} has no file"
    return Path(file).parent
