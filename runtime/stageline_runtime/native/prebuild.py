"""`python -m stageline_runtime.native.prebuild`: compile the kernels into the package, when an image is built.

Each start of a stage then saves compiling them. Elsewhere than on x86-64 there is nothing to build, and stages compile.
"""

import platform
import sys

import click

from stageline_runtime.native.build import (
    LEVELS,
    PREBUILT,
    NativeUnavailableError,
    compile_library,
    prebuilt_path,
    require_compiler,
)


def main() -> int:
    """Compile for every level; returns the exit status."""
    if platform.machine() != "x86_64":
        click.echo(f"prebuild: nothing to build for {platform.machine()}; stages compile their kernels as they start")
        return 0
    try:
        compiler = require_compiler()
        PREBUILT.mkdir(exist_ok=True)
        for level in LEVELS:
            compile_library(compiler, level, prebuilt_path(level))
            click.echo(f"prebuild: {prebuilt_path(level).name}")
    except NativeUnavailableError as error:
        click.echo(f"prebuild: {error}", err=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
