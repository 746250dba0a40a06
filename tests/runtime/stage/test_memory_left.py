"""What a stage reports as available: the machine's memory or what its control group leaves, file pages not counted."""

from pathlib import Path

import pytest

from stageline_runtime.planning import this_machine

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 8 GiB available and an empty control group directory."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 16777216 kB\nMemFree: 1 kB\nMemAvailable: 8388608 kB\n")
    monkeypatch.setattr(this_machine, "_MEMINFO", meminfo)
    monkeypatch.setattr(this_machine, "_CGROUP", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("limit", "used", "inactive_file", "expected"),
    [
        (None, None, None, 8 * GIB),
        ("max", str(GIB), None, 8 * GIB),
        (str(4 * GIB), str(GIB), None, 3 * GIB),
        (str(4 * GIB), str(3 * GIB), 2 * GIB, 3 * GIB),
        (str(4 * GIB), str(5 * GIB), None, 0),
        (str(64 * GIB), str(GIB), 0, 8 * GIB),
    ],
)
def test_available_bytes(
    machine: Path, limit: str | None, used: str | None, inactive_file: int | None, expected: int
) -> None:
    for name, text in (("memory.max", limit), ("memory.current", used)):
        if text is not None:
            (machine / name).write_text(text + "\n")
    if inactive_file is not None:
        (machine / "memory.stat").write_text(f"anon 1\nfile 2\ninactive_file {inactive_file}\nactive_file 3\n")
    assert this_machine.available_bytes() == expected


def test_stages_of_one_machine_are_told_apart_only_by_limits_of_their_own(machine: Path) -> None:
    unlimited = this_machine.host_identity()
    assert this_machine.host_identity() == unlimited
    (machine / "memory.max").write_text("1000\n")
    assert this_machine.host_identity().startswith(f"{unlimited}/")
