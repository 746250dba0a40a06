"""An image's stages find their kernels compiled; what was made of other sources or for other CPUs is never taken."""

import ctypes
from pathlib import Path

import pytest
import torch

from stageline_runtime.native import build, prebuild
from stageline_runtime.native.attention_kernel import HeadShape
from stageline_runtime.native.build import LEVELS, NativeUnavailableError, cpu_level, load_library, prebuilt_path
from stageline_runtime.native.row_kernels import RowKernels, kernels_if_possible
from stageline_runtime.planning import cpu_features

V3 = "fpu avx avx2 bmi1 bmi2 f16c fma abm movbe xsave sse4_2"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl amx_tile"
SHAPE = HeadShape(num_kv_heads=1, group_size=1, head_dim=64, slot_tokens=64, dtype=torch.float32)


@pytest.fixture
def prebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package's folder of an image, still empty."""
    folder = tmp_path / "prebuilt"
    for module in (build, prebuild):
        monkeypatch.setattr(module, "PREBUILT", folder)
    return folder


def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")


def with_cpu(flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor\t: 0\nflags\t\t: {flags}\nprocessor\t: 1\nflags\t\t: {flags}\n")
    monkeypatch.setattr(cpu_features, "CPU_INFO", info)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")


@pytest.mark.parametrize(
    ("flags", "level"),
    [(V4, "x86-64-v4"), (V3, "x86-64-v3"), (V4.replace("avx512vl", ""), "x86-64-v3"), ("fpu sse2", None)],
    ids=["v4", "v3", "half-of-v4", "older"],
)
def test_the_best_level_that_the_cpu_has_is_chosen(
    flags: str, level: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_cpu(flags, tmp_path, monkeypatch)
    assert cpu_level() == level
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert cpu_level() is None


@pytest.mark.skipif(cpu_level() is None, reason="this CPU is of none of the levels: run it on x86-64 with AVX2")
def test_what_the_image_brings_is_loaded_and_computes_as_what_is_compiled_here(
    prebuilt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = load_library()
    assert prebuild.main() == 0
    assert sorted(prebuilt.iterdir()) == sorted(map(prebuilt_path, LEVELS))
    without_compiler(monkeypatch)
    loaded = load_library()
    assert loaded._name.startswith(str(prebuilt))
    rows = torch.randn(5, 96)
    weight = torch.rand(96)
    found, expected = (_normed(library, rows, weight) for library in (loaded, compiled))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert kernels_if_possible(SHAPE) is not None


def test_kernels_of_other_sources_are_never_loaded(
    prebuilt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_cpu(V3, tmp_path, monkeypatch)
    prebuilt.mkdir()
    stale = prebuilt_path("x86-64-v3").with_name("kernels-x86-64-v3-0123456789abcdef.so")
    stale.write_bytes(b"not even a library")
    without_compiler(monkeypatch)
    with pytest.raises(NativeUnavailableError, match="no C compiler on the path"):
        load_library()


def test_a_source_that_changes_changes_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = prebuilt_path("x86-64-v3").name
    for source in build._SOURCE.parent.glob("*.[ch]"):
        (tmp_path / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(build, "_SOURCE", tmp_path / "kernels.c")
    assert prebuilt_path("x86-64-v3").name == before
    header = next(tmp_path.glob("*.h"))
    header.write_text(header.read_text() + "/* changed */\n")
    assert prebuilt_path("x86-64-v3").name != before


def test_an_image_is_not_built_without_a_compiler(
    prebuilt: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    without_compiler(monkeypatch)
    assert prebuild.main() == 1
    assert "no C compiler on the path" in capsys.readouterr().err
    assert not prebuilt.exists()


def _normed(library: ctypes.CDLL, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return RowKernels(library, torch.float32).rms_norm(rows, weight, 1e-5)
