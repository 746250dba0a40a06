"""What a process made while it started is not walked again by the garbage collector; what loading left is gone."""

import subprocess
import sys

PROGRAM = """
import gc, weakref
from stageline_api.standing_heap import settle_heap

class Node:
    pass

def cycle():
    node = Node()
    node.me = node
    return weakref.ref(node)

gc.disable()
kept = [Node() for _ in range(1000)]
left = cycle()
settle_heap()
assert left() is None, "a cycle of the start would stay for good"
assert gc.get_freeze_count() > 1000, gc.get_freeze_count()
assert not any(isinstance(each, Node) for each in gc.get_objects())
later = cycle()
gc.collect()
assert later() is None, "what comes later is collected as ever"
"""


def test_what_is_alive_stays_what_is_garbage_goes() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
