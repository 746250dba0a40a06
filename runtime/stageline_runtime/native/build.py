"""The C kernels, loaded: those that the image was built with for a CPU like this one, or compiled for this very CPU.

Compiling takes more than a second of a core in each process, so an image brings libraries for the usual levels of
x86-64 (`prebuild`), in the package itself: as trusted as the code beside them, and named by the sources and flags that
they were made of, so that others are never taken for them. No other library is ever read: a shared cache would hold
code for another node's CPU, and code that nobody here made. Compiling and linking are separate steps, because a
compiler that links with `-ffast-math` adds start-up code that changes how the whole process treats denormal numbers.
OpenMP is compiled in but not linked, so that its calls bind to the runtime torch has loaded already and both share one
pool of threads.

A compiler has a limit of its own processor time, which a busy machine doesn't shorten. That it doesn't end for other
reasons, as on a disk that has gone, is told apart (`CompilerTooLateError`): it is nobody's configuration.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

from stageline_api import env
from stageline_runtime.plan_bus.step_plan import BLOCK_TOKENS
from stageline_runtime.planning.cpu_features import cpu_features

COMPILER_CPU_SECONDS = 60
"""Of each of its processes, thirty times what they take."""
LONGEST_COMPILE_SECONDS = 900.0
"""By the clock, however busy the machine is."""
PREBUILT = Path(__file__).parent / "prebuilt"
_SOURCE = Path(__file__).parent / "kernels.c"
_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-O3", "-ffast-math", "-fPIC", "-std=gnu11", f"-DBLOCK_TOKENS={BLOCK_TOKENS}")

_AVX2 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"})
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
LEVELS: Mapping[str, frozenset[str]] = MappingProxyType({"x86-64-v4": _AVX2 | _AVX512, "x86-64-v3": _AVX2})
"""What the kernels are prebuilt for, the best first, and the names of the features in `/proc/cpuinfo` that it takes
(x86-64 psABI, section 3.1.1)."""


class NativeUnavailableError(Exception):
    """The kernels can't be had on this machine; the message says why."""


class CompilerTooLateError(NativeUnavailableError):
    """They may be had another time: the compiler has not come to its end, though it didn't use up its time."""


def find_compiler() -> str | None:
    """The C compiler to use: `CC` from the environment, or the first of the usual names on the path."""
    return (
        shutil.which(os.environ["CC"])
        if os.environ.get("CC")
        else next(filter(None, map(shutil.which, _COMPILERS)), None)
    )


def require_compiler() -> str:
    """The same; raises NativeUnavailableError where there is none."""
    compiler = find_compiler()
    if compiler is None:
        raise NativeUnavailableError("no C compiler on the path (cc, gcc, clang)")
    return compiler


def load_library() -> ctypes.CDLL:
    """The prebuilt kernels where there are some for this CPU, else compiled ones.

    Raises:
        NativeUnavailableError: with the reason why they can't be had.
    """
    given = os.environ.get(env.NATIVE_LIBRARY)
    ready = Path(given) if given else _prebuilt()
    return _library_made_by(require_compiler()) if ready is None else _loaded(ready)


def library_for_others(directory: Path) -> Path:
    """The kernels as a file, for other processes to find by `env.NATIVE_LIBRARY`: prebuilt, or compiled into
    `directory`.

    Raises:
        NativeUnavailableError: with the reason why they can't be had.
    """
    ready = _prebuilt()
    if ready is not None:
        return ready
    library = directory / "kernels.so"
    compile_library(require_compiler(), "native", library)
    return library


def _prebuilt() -> Path | None:
    level = cpu_level()
    path = None if level is None else prebuilt_path(level)
    return path if path is not None and path.exists() else None


def cpu_level() -> str | None:
    """The best of `LEVELS` that this CPU has; None where it has none."""
    if platform.machine() != "x86_64":
        return None
    features = cpu_features()
    return next((level for level, needed in LEVELS.items() if needed.issubset(features)), None)


def prebuilt_path(level: str) -> Path:
    """Where the kernels for `level` lie if they were built from the present sources with the present flags."""
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for source in sorted([_SOURCE, *_SOURCE.parent.glob("*.h")]):
        digest.update(source.read_bytes())
    return PREBUILT / f"kernels-{level}-{digest.hexdigest()[:16]}.so"


def compile_library(compiler: str, march: str, library: Path) -> None:
    """Compile the kernels for `march` into `library`; raises NativeUnavailableError."""
    compiled = library.with_suffix(".o")
    _run([compiler, *_FLAGS, f"-march={march}", "-fopenmp", "-c", str(_SOURCE), "-o", str(compiled)])
    _run([compiler, "-shared", str(compiled), "-o", str(library), "-lm"])
    compiled.unlink()


@cache
def _library_made_by(compiler: str) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory(prefix="stageline-kernels-") as directory:
        library = Path(directory) / "kernels.so"
        compile_library(compiler, "native", library)
        return _loaded(library)


def _loaded(library: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(library), mode=os.RTLD_NOW)
    except OSError as error:
        raise NativeUnavailableError(f"the compiled kernels can't be loaded: {error}") from error


def _run(command: list[str]) -> None:
    limited = ["/bin/sh", "-c", f'ulimit -S -t {COMPILER_CPU_SECONDS} 2>/dev/null; exec "$@"', "sh", *command]
    try:
        result = subprocess.run(limited, capture_output=True, text=True, timeout=LONGEST_COMPILE_SECONDS, check=False)
    except OSError as error:
        raise NativeUnavailableError(f"{command[0]} can't be run: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise CompilerTooLateError(
            f"{command[0]} has not ended within {LONGEST_COMPILE_SECONDS:g} s, in which it has not used "
            f"{COMPILER_CPU_SECONDS} s of a processor"
        ) from error
    if result.returncode == -signal.SIGXCPU:
        raise NativeUnavailableError(f"{command[0]} took more than {COMPILER_CPU_SECONDS} s of a processor")
    if result.returncode != 0:
        words = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise NativeUnavailableError(f"{command[0]} failed with status {result.returncode}: {words}")
