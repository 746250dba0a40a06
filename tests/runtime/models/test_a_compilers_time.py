"""A compiler is limited by what it computes; that a machine is busy is no configuration's fault."""

from dataclasses import replace
from pathlib import Path

import pytest

from processes.transport_ends import transport_contract
from stageline_api import env
from stageline_api.failures import FailureClass
from stageline_runtime.native import build
from stageline_runtime.native.build import CompilerTooLateError, NativeUnavailableError, compile_library
from stageline_runtime.stage.ranks import supervisor
from stageline_runtime.stage.ranks.shared_kernels import no_shared_memory

WRITES_WHAT_IS_ASKED_FOR = 'while [ "$1" != -o ]; do shift; done; touch "$2"'


def compiler_that(does: str, directory: Path) -> str:
    """The path of a compiler that is a shell script."""
    script = directory / "compiler"
    script.write_text(f"#!/bin/sh\n{does}\n")
    script.chmod(0o755)
    return str(script)


def test_one_that_waits_for_a_processor_goes_on_and_one_that_only_computes_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "COMPILER_CPU_SECONDS", 1)
    library = tmp_path / "kernels.so"
    compile_library(compiler_that(f"sleep 1.1; {WRITES_WHAT_IS_ASKED_FOR}", tmp_path), "native", library)
    assert library.exists()
    with pytest.raises(NativeUnavailableError, match=r"compiler took more than 1 s of a processor"):
        compile_library(compiler_that("while :; do :; done", tmp_path), "native", library)


def test_one_that_does_not_end_may_the_next_time_and_one_that_is_not_there_will_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "LONGEST_COMPILE_SECONDS", 0.2)
    with pytest.raises(CompilerTooLateError, match=r"compiler has not ended within 0.2 s") as late:
        compile_library(compiler_that("exec sleep 600", tmp_path), "native", tmp_path / "kernels.so")
    absent = NativeUnavailableError("no C compiler on the path (cc, gcc, clang)")
    failures = [no_shared_memory(2, error, "start the ranks") for error in (late.value, absent)]
    assert [failure.failure_class for failure in failures] == [FailureClass.MODEL_LOAD, FailureClass.BAD_CONFIG]
    assert failures[0].detail.startswith("spec.parallelism: 2 ranks can't share memory: ")


def supervisor_of(device: str) -> supervisor.RankSupervisor:
    contract = transport_contract(0, 60, stage_count=1)
    config = contract.config.model_copy(update={"tensor": 2, "device": device})
    return supervisor.RankSupervisor(replace(contract, config=config))


@pytest.mark.parametrize("device", ["cpu", "auto", "cuda"])
def test_ranks_that_may_have_devices_are_started_without_kernels(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether they do, only they find out; one that has none then says what it lacks."""
    monkeypatch.delenv(env.NATIVE_LIBRARY, raising=False)
    asked: list[Path] = []

    def without_a_compiler(directory: Path) -> Path:
        asked.append(directory)
        raise NativeUnavailableError("no C compiler on the path (cc, gcc, clang)")

    monkeypatch.setattr(supervisor, "library_for_others", without_a_compiler)
    if device == "cpu":
        with pytest.raises(NativeUnavailableError, match="no C compiler"):
            supervisor_of(device)._provide_kernels(tmp_path)
    else:
        supervisor_of(device)._provide_kernels(tmp_path)
    assert asked == ([] if device == "cuda" else [tmp_path])


def test_a_compiler_that_is_late_ends_the_stage_before_its_ranks_try_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(_directory: Path) -> Path:
        raise CompilerTooLateError("cc has not ended within 900 s")

    monkeypatch.setattr(supervisor, "library_for_others", late)
    with pytest.raises(CompilerTooLateError):
        supervisor_of("auto")._provide_kernels(tmp_path)
