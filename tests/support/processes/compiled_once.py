"""A C compiler for tests that compiles the kernels once for all processes of a test run, not once in each.

Every stage compiles the kernels when it loads (`native.build` says why), about two seconds of a core, and the
tests start hundreds of stages. `first_on_path` puts a `cc` before the real one that keeps what it made under a digest
of the compiler, its flags and every source beside the one it compiles; all else goes to the real one. As a program
this module is that `cc`.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

_NATIVE = Path("stageline_runtime", "native")


def first_on_path(cache: Path) -> str:
    """`PATH` with the caching `cc` in front; what it makes lies in `cache`. As it was where there is no `cc`."""
    path = os.environ.get("PATH", os.defpath)
    real = shutil.which("cc")
    if real is None:
        return path
    programs = cache / "bin"
    programs.mkdir(parents=True, exist_ok=True)
    made = programs / f"cc.{os.getpid()}"
    made.write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS "{__file__}" "{real}" "{cache}" "$@"\n', encoding="utf-8")
    made.chmod(0o755)
    made.replace(programs / "cc")
    return os.pathsep.join((str(programs), path))


def _digest(compiler: str, flags: list[str], folder: Path) -> str:
    digest = hashlib.sha256(repr((compiler, Path(compiler).stat().st_mtime_ns, flags)).encode())
    for source in sorted(folder.glob("*.[ch]")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _compile(compiler: str, cache: Path, arguments: list[str]) -> int:
    source, target = (Path(arguments[arguments.index(flag) + 1]) for flag in ("-c", "-o"))
    kept = cache / _digest(compiler, [each for each in arguments if each != str(target)], source.parent)
    if not kept.exists():
        made = cache / f"{kept.name}.{os.getpid()}"
        command = [str(made) if each == str(target) else each for each in arguments]
        if status := subprocess.run([compiler, *command], check=False).returncode:
            return status
        made.replace(kept)
    shutil.copyfile(kept, target)
    return 0


def _main(compiler: str, cache: str, *arguments: str) -> int:
    source = Path(arguments[arguments.index("-c") + 1]) if {"-c", "-o"} <= {*arguments} else None
    if source is None or source.parent.parts[-2:] != _NATIVE.parts:
        os.execv(compiler, [compiler, *arguments])
    return _compile(compiler, Path(cache), [*arguments])


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
