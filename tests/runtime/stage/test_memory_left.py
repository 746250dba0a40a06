"""What a stage may take: the machine's memory and cores, or what its control group leaves of them."""

import os
from pathlib import Path

import pytest

from stageline_api import env
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


@pytest.mark.parametrize(
    ("groups", "limit", "used", "expected"),
    [
        ("4", "max", 0, 4 * GIB),
        ("2", "max", 12 * GIB, 8 * GIB),
        ("2", str(6 * GIB), 0, 3 * GIB),
        ("2", str(6 * GIB), 3 * GIB, 3 * GIB),
        ("2", str(6 * GIB), 4 * GIB, 2 * GIB),
        ("0", "max", 0, 8 * GIB),
        ("two", "max", 0, 8 * GIB),
    ],
)
def test_groups_on_one_machine_have_a_part_each(
    machine: Path, monkeypatch: pytest.MonkeyPatch, groups: str, limit: str, used: int, expected: int
) -> None:
    """Of its 16 GiB, or two that start at once would each take all. What others hold is not taken off twice."""
    (machine / "memory.max").write_text(limit)
    (machine / "memory.current").write_text(str(used))
    monkeypatch.setenv(env.GROUPS_ON_MACHINE, groups)
    assert this_machine.available_bytes() == expected


@pytest.mark.parametrize(
    ("limit", "used", "inactive_file", "expected"),
    [
        (9223372036854771712, GIB, 0, 8 * GIB),
        (4 * GIB, GIB, 0, 3 * GIB),
        (4 * GIB, 3 * GIB, 2 * GIB, 3 * GIB),
        (4 * GIB, 5 * GIB, 0, 0),
        (64 * GIB, GIB, 0, 8 * GIB),
    ],
)
def test_version_1_of_control_groups_limits_memory_too(
    machine: Path, limit: int, used: int, inactive_file: int, expected: int
) -> None:
    group = machine / "memory"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (group / "memory.usage_in_bytes").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"inactive_file 7\ntotal_inactive_file {inactive_file}\n")
    assert this_machine.available_bytes() == expected
    is_limited = limit < 1 << 60
    assert (this_machine.memory_identity() == this_machine.container_identity()) is is_limited


def test_kills_are_counted_in_either_version(tmp_path: Path) -> None:
    for name, text in (("events", "oom 4\noom_kill 3\n"), ("oom_control", "under_oom 0\noom_kill 3\n")):
        (tmp_path / name).write_text(text)
        assert this_machine.kernel_kills(tmp_path / name) == 3


def test_a_memory_limit_separates_the_memory_of_containers_and_never_their_machine(machine: Path) -> None:
    host = this_machine.host_identity()
    assert this_machine.memory_identity() == host
    (machine / "memory.max").write_text("1000\n")
    assert this_machine.host_identity() == host
    assert this_machine.memory_identity() == this_machine.container_identity() != host


@pytest.mark.parametrize(
    ("files", "on_host", "in_container", "expected"),
    [
        pytest.param({}, 1, 1, 64, id="no-limit-is-known"),
        pytest.param({"cpu.max": "max 100000"}, 2, 1, 32, id="two-stages-share-the-machine"),
        pytest.param({"cpu.max": "400000 100000"}, 1, 1, 4, id="limits-cpu-4"),
        pytest.param({"cpu.max": "400000 100000"}, 2, 1, 4, id="each-pod-has-its-own-limit"),
        pytest.param({"cpu.max": "400000 100000"}, 2, 2, 2, id="two-stages-share-a-limit"),
        pytest.param({"cpu.max": "50000 100000"}, 1, 1, 1, id="half-a-core"),
        pytest.param({"cpu.max": "9000000 100000"}, 1, 1, 64, id="a-limit-above-the-machine"),
        pytest.param({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 1, 1, 3, id="version-1"),
        pytest.param({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 1, 1, 64, id="version-1-open"),
    ],
)
def test_a_stage_takes_as_many_threads_as_it_may_run_at_once(
    machine: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, str],
    on_host: int,
    in_container: int,
    expected: int,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(64)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, text in files.items():
        (machine / name).parent.mkdir(exist_ok=True)
        (machine / name).write_text(text + "\n")
    assert this_machine.stage_threads(on_host, in_container) == expected


@pytest.mark.parametrize(("asked", "expected"), [("3", 3), ("100", 32), ("0", 1), ("", 32), ("many", 32)])
def test_whoever_starts_a_stage_may_give_it_fewer_threads(
    machine: Path, monkeypatch: pytest.MonkeyPatch, asked: str, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(64)))
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert this_machine.stage_threads(2, 1) == expected, machine
