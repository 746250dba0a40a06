"""What vLLM starts ends with whoever started it, also by SIGKILL."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from processes.serving_command import alive, wait_gone
from stageline_vllm.worker_state import DIRECTORY_VARIABLE

PARENT = """
import multiprocessing, os, signal, sys, time

def child(pipe, is_late):
    from stageline_vllm.plugin.parent_death import register
    pipe.send(os.getpid())
    while is_late and os.getppid() == {parent}:
        time.sleep(0.01)
    register()
    register()
    pipe.send("registered")
    time.sleep(600)

if __name__ == "__main__":
    from stageline_vllm.plugin.parent_death import register
    register()  # of no process of multiprocessing's: nothing to end with
    ours, theirs = multiprocessing.Pipe()
    started = multiprocessing.get_context("fork").Process(target=child, args=(theirs, {is_late}))
    started.start()
    print(ours.recv(), flush=True)
    if not {is_late}:
        ours.recv()
        print("registered", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("is_late", [False, True], ids=["registered before", "too late"])
def test_a_child_goes_with_a_parent_that_is_killed(is_late: bool, tmp_path: Path) -> None:
    program = PARENT.format(parent="os.getppid()" if not is_late else "PARENT", is_late=is_late)
    program = program.replace("PARENT", "multiprocessing.parent_process().pid")
    environment = {**os.environ, DIRECTORY_VARIABLE: str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        if not is_late:
            assert parent.stdout.readline() == "registered\n"
        assert alive(child)
        parent.kill()
        wait_gone([child], 30.0)


def test_elsewhere_than_under_a_supervisor_nothing_is_changed() -> None:
    program = PARENT.format(parent=0, is_late=False)
    environment = {name: value for name, value in os.environ.items() if name != DIRECTORY_VARIABLE}
    with subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.stdout.readline()
        parent.kill()
        parent.wait()
        time.sleep(0.3)
        assert alive(child)
        os.kill(child, 9)
