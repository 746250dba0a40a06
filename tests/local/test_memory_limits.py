"""A container that holds more memory than its limit is ended as a kubelet would end it; any other is left alone."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cluster.node_pods import NodeFixture, pod_of, python_container
from stageline_local.node.memory_limit import held_bytes, memory_limit_bytes

MIB = 2**20
ALLOCATE = "held = bytearray(os.urandom(4096)) * (200 * 256)\n"
"""200 MiB, every page of it written."""
FOREVER = "print('holds it'); time.sleep(600)"
IN_A_CHILD = f"""
import subprocess
subprocess.Popen([sys.executable, '-c', {"import os, time" + chr(10) + ALLOCATE + "time.sleep(600)"!r}])
time.sleep(600)
"""
FORKED = ALLOCATE + "os.fork()\n"
MAPPED = """
import mmap
with open('weights', 'wb') as file: file.write(os.urandom(4096) * (200 * 256))
with open('weights', 'rb') as file: held = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
total = sum(held[page] for page in range(0, len(held), 4096))
"""


def limited(script: str, memory: str | None) -> dict[str, Any]:
    limits: dict[str, Any] = {} if memory is None else {"resources": {"limits": {"memory": memory, "cpu": "1"}}}
    return pod_of(python_container(script, **limits))


@pytest.mark.parametrize("script", [ALLOCATE + FOREVER, IN_A_CHILD], ids=["itself", "in-a-child"])
def test_a_container_over_its_limit_is_killed_for_it(tmp_path: Path, script: str) -> None:
    async def body() -> None:
        fixture = NodeFixture(tmp_path)
        try:
            fixture.node.create_pod(limited(script, "100Mi"))
            ended = await fixture.until_ended()
            assert (ended["reason"], ended["exitCode"], ended["signal"]) == ("OOMKilled", 137, 9)
            assert fixture.status()["phase"] == "Failed"
        finally:
            await fixture.node.close(grace_seconds=0)

    asyncio.run(body())


@pytest.mark.parametrize(
    ("script", "held_mib"),
    [(ALLOCATE, (200, 250)), (MAPPED, (0, 50)), (FORKED, (200, 290))],
    ids=["its-own", "mapped-files", "shared-with-its-children"],
)
def test_what_counts_is_what_a_cgroup_could_not_take_back(
    tmp_path: Path, script: str, held_mib: tuple[int, int]
) -> None:
    """Under a limit of 300 MiB, and with it left alone."""

    async def body() -> None:
        fixture = NodeFixture(tmp_path)
        try:
            fixture.node.create_pod(limited(script + FOREVER, "300Mi"))
            await fixture.until(lambda: fixture.log().count("holds it") == 1 + script.count("fork"))
            pid = fixture.node.pid_of("default", "p", "main")
            assert pid is not None
            least, most = held_mib
            assert least * MIB <= held_bytes(pid, 300 * MIB) <= most * MIB
            assert "running" in fixture.container()["state"], fixture.container()
        finally:
            await fixture.node.close(grace_seconds=0)

    asyncio.run(body())


def test_without_a_limit_nothing_is_kept_to() -> None:
    containers = [limited(FOREVER, memory)["spec"]["containers"][0] for memory in (None, "0", "1Gi")]
    assert [memory_limit_bytes(container) for container in containers] == [None, None, 2**30]
