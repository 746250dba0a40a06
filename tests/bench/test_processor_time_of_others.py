"""A round of a benchmark says how much processor time others took meanwhile: by a `/proc` of some processes."""

import os
from pathlib import Path

from stageline_bench.runtime.record.others import OthersClock

TICKS = os.sysconf("SC_CLK_TCK")
OWN, CHILD, GRANDCHILD, STRANGER = 10, 11, 12, 20


def write_machine(proc: Path, *, user: int = 0, system: int = 0, idle: int = 0, stolen: int = 0) -> None:
    """In seconds. Time of guests is part of user time."""
    fields = [user, 0, system, idle, 7 * idle, 0, 0, stolen, 3 * user, 0]
    words = " ".join(str(seconds * TICKS) for seconds in fields)
    (proc / "stat").write_text(f"cpu  {words}\ncpu0 {words}\nbtime 1\n")


def write_process(proc: Path, pid: int, seconds: int, children: tuple[int, ...] = ()) -> None:
    task = proc / str(pid) / "task" / str(pid)
    task.mkdir(parents=True, exist_ok=True)
    ticks = seconds * TICKS
    (proc / str(pid) / "stat").write_text(f"{pid} (a) name (b) S 1 1 1 0 -1 0 0 0 0 0 {ticks - 1} 1 99 99 20 0")
    (task / "children").write_text("".join(f"{child} " for child in children))


def write_all(proc: Path, own: int, child: int, grandchild: int, stranger: int) -> None:
    write_process(proc, OWN, own, (CHILD,))
    write_process(proc, CHILD, child, (GRANDCHILD,))
    write_process(proc, GRANDCHILD, grandchild)
    write_process(proc, STRANGER, stranger)


def test_whatever_was_started_below_is_no_other(tmp_path: Path) -> None:
    write_machine(tmp_path, user=100, system=10, idle=50)
    write_all(tmp_path, own=1, child=2, grandchild=3, stranger=40)
    clock = OthersClock(tmp_path, OWN)
    assert clock.seconds() == 0
    write_machine(tmp_path, user=104, system=12, idle=500)
    write_all(tmp_path, own=2, child=4, grandchild=6, stranger=40)
    assert clock.seconds() == 0, "six seconds more of the machine, and of its own"
    write_machine(tmp_path, user=107, system=12, idle=500, stolen=2)
    write_all(tmp_path, own=2, child=4, grandchild=6, stranger=43)
    assert clock.seconds() == 5, "three of a stranger and two that another machine took"


def test_it_runs_on_this_machine() -> None:
    clock = OthersClock()
    assert clock.seconds() >= 0
