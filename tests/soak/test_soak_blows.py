"""Whom `make soak` hits, and that it reads and stops real processes, and ends without leaving one."""

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chaos.soak_disturber import BLOWS, Blow, Disturber, Victim, living, stop_for
from chaos.soak_vitals import leak, vitals_of
from processes.serving_command import ServingCommand, alive, descendants, wait_gone
from stageline_api import env
from stageline_local.session.instance import process_start_ticks

SUPPORT = Path(__file__).parents[1] / "support"
ALIVE = [
    Victim(pid, pid, kind, group, 1)
    for pid, (kind, group) in enumerate(
        [("stage", 0), ("stage", 0), ("engine", 0), ("stage", 1), ("stage", 1), ("engine", 1), ("gateway", -1)]
    )
]
HOLDS_MORE_WHEN_TOLD = """
import sys
held = []
for line in sys.stdin:
    held += [open("/dev/null") for _ in range(40)]
    held.append(bytearray(80 * 1024 * 1024))
    print("done", flush=True)
"""


@pytest.fixture
def engine_alike() -> Iterator[subprocess.Popen[str]]:
    """A child whose command line and environment are those of group 1's engine, under a parent of its own."""
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HOLDS_MORE_WHEN_TOLD!r}, 'engine'])"
    variables = {**os.environ, env.GROUP_INDEX: "1", env.INCARNATION: "3", env.STAGE_INDEX: "0"}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables
    ) as process:
        until(lambda: len(living(process.pid)) == 1, lambda: f"{descendants(process.pid)}")
        yield process
        assert process.stdin is not None
        process.stdin.close()
        process.wait(timeout=60)


def until(holds: Callable[[], bool], state: Callable[[], str]) -> None:
    deadline = time.monotonic() + 300
    while not holds():
        assert time.monotonic() < deadline, state()
        time.sleep(0.02)


def disturber(seed: int = 1) -> Disturber:
    nobody = ServingCommand(subprocess.Popen(["true"]), 1, Path(), Path())
    nobody.process.wait(timeout=60)
    return Disturber(nobody, random.Random(seed), lambda _: None)


@pytest.mark.parametrize("blow", BLOWS, ids=[blow.name for blow in BLOWS])
def test_a_blow_hits_the_kinds_that_it_names_in_as_many_groups(blow: Blow) -> None:
    for seed in range(20):
        victims = disturber(seed).choose(blow, ALIVE)
        assert tuple(victim.kind for victim in victims) == blow.kinds
        assert len({victim.group for victim in victims}) == (1 if blow.in_one_group else len(blow.kinds))
        assert disturber(seed).choose(blow, []) == []


def test_a_group_s_process_is_known_and_its_growth_seen(engine_alike: subprocess.Popen[str]) -> None:
    [victim] = living(engine_alike.pid)
    assert (victim.kind, victim.group, victim.incarnation) == ("engine", 1, 3)
    root, before = vitals_of(engine_alike.pid)[::-1]
    assert (root.role, before.role) == ("up", "group 1 engine")
    assert engine_alike.stdin is not None
    assert engine_alike.stdout is not None
    engine_alike.stdin.write("more\n")
    engine_alike.stdin.flush()
    assert engine_alike.stdout.readline() == "done\n"
    after = vitals_of(engine_alike.pid)[0]
    assert re.fullmatch(
        r"group 1 engine \(pid \d+\): memory \d+ to \d+ MiB, descriptors \d+ to \d+", leak(before, after)
    )
    assert leak(after, before) == ""


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_stopped_process_goes_on_also_when_the_soak_is_interrupted(engine_alike: subprocess.Popen[str]) -> None:
    [victim] = living(engine_alike.pid)

    async def interrupted() -> None:
        stopping = asyncio.create_task(stop_for([victim], 600))
        await asyncio.to_thread(until, lambda: state_of(victim.pid) == "T", lambda: state_of(victim.pid))
        stopping.cancel()
        await asyncio.gather(stopping, return_exceptions=True)

    asyncio.run(interrupted())
    until(lambda: state_of(victim.pid) != "T", lambda: state_of(victim.pid))


def test_another_process_under_the_id_of_one_that_ended_is_left_alone(engine_alike: subprocess.Popen[str]) -> None:
    [victim] = living(engine_alike.pid)
    later = Victim(victim.pid, victim.start_ticks + 1, "engine", 1, 3)
    asyncio.run(stop_for([later], 0.0))
    assert process_start_ticks(victim.pid) == victim.start_ticks
    assert state_of(victim.pid) != "T"


def test_an_interrupted_soak_ends_with_its_report_and_leaves_no_process(tmp_path: Path) -> None:
    log = tmp_path / "soak.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "chaos.soak", "--minutes", "9", "--only", "pipeline", "--seed", "1"],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(SUPPORT), "TMPDIR": str(tmp_path)},
        )
    try:
        until(lambda: len(living(process.pid)) >= 1, log.read_text)
        children = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 130, log.read_text()
    finally:
        process.kill()
        process.wait(timeout=60)
    wait_gone(children, timeout_seconds=60)
    assert not any(alive(pid) for pid in children)
    assert "pipeline: seed 1, 9 minutes asked, NOT FINISHED" in log.read_text()
    assert "Traceback" not in log.read_text()
