"""Compiles the C sources beside this file for this very CPU and loads them: about a second, once in each process.

Nothing is kept on disk: a shared cache would hold code for another node's CPU, and a library found on disk would be
code that nobody here made. Compiling and linking are separate steps, because a compiler that links with `-ffast-math`
adds start-up code that changes how the whole process treats denormal numbers. OpenMP is compiled in but not linked, so
that its calls bind to the runtime torch has loaded already and both share one pool of threads.
"""

import ctypes
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

COMPILE_SECONDS = 60.0
_SOURCE = Path(__file__).parent / "kernels.c"
_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-O3", "-march=native", "-ffast-math", "-fPIC", "-std=gnu11")


class NativeUnavailableError(Exception):
    """The kernels can't be had on this machine; the message says why."""


def find_compiler() -> str | None:
    """The C compiler to use: `CC` from the environment, or the first of the usual names on the path."""
    return (
        shutil.which(os.environ["CC"])
        if os.environ.get("CC")
        else next(filter(None, map(shutil.which, _COMPILERS)), None)
    )


def load_library() -> ctypes.CDLL:
    """Compile and load the kernels; raises NativeUnavailableError with the reason where that fails."""
    compiler = find_compiler()
    if compiler is None:
        raise NativeUnavailableError("no C compiler on the path (cc, gcc, clang)")
    return _library_made_by(compiler)


@cache
def _library_made_by(compiler: str) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory(prefix="stageline-kernels-") as directory:
        compiled, library = Path(directory) / "kernels.o", Path(directory) / "kernels.so"
        _run([compiler, *_FLAGS, "-fopenmp", "-c", str(_SOURCE), "-o", str(compiled)])
        _run([compiler, "-shared", str(compiled), "-o", str(library), "-lm"])
        try:
            return ctypes.CDLL(str(library), mode=os.RTLD_NOW)
        except OSError as error:
            raise NativeUnavailableError(f"the compiled kernels can't be loaded: {error}") from error


def _run(command: list[str]) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailableError(f"{command[0]} can't be run: {error}") from error
    if result.returncode != 0:
        words = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise NativeUnavailableError(f"{command[0]} failed with status {result.returncode}: {words}")
