"""Stages of tests compile their kernels by a `cc` that keeps them: one that kept nothing would be seen by nobody."""

import shutil
from pathlib import Path

import pytest

from processes.compiled_once import first_on_path
from stageline_runtime.native.build import compile_library

COMPILER = """#!/bin/sh
echo "$@" >>"$0.calls"
for word in "$@"; do [ "$last" = -o ] && echo made >"$word"; last=$word; done
"""
"""Says what it was asked for, and makes something."""


def test_the_second_stage_finds_what_the_first_one_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "real" / "cc"
    compiler.parent.mkdir()
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{compiler.parent}:/usr/bin:/bin")
    monkeypatch.setenv("PATH", first_on_path(tmp_path / "kept"))
    found = shutil.which("cc")
    assert found is not None
    assert Path(found) != compiler
    libraries = [tmp_path / f"{name}.so" for name in ("first", "second")]
    for library in libraries:
        compile_library(found, "native", library)
    calls = compiler.with_name("cc.calls").read_text().splitlines()
    assert [" -c " in call for call in calls] == [True, False, False], calls
    assert [library.read_text() for library in libraries] == ["made\n"] * 2
