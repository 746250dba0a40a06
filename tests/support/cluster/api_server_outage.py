"""A control plane without its API server, for as long as a test wants, in which nothing else is taken for lost.

The controllers sleep meanwhile, and on until every node that lived has beaten anew. Else they would find, as soon as
they could write, that no node has beaten for longer than a node may be silent, and call lost whichever has not come
before them; and what they watch they would ask for again only half a minute later.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from cluster.control_plane import NODE_LOST_SECONDS, ControlPlane

_CONTROLLERS: Final = ("kube-controller-manager", "kube-scheduler")


@contextmanager
def api_server_outage(plane: ControlPlane) -> Iterator[None]:
    """The API server is killed for the length of the block, and ready again after it."""
    with _asleep(plane):
        plane.stop_process("kube-apiserver", hard=True)
        try:
            yield
        finally:
            plane.start_api_server()
            plane.wait_ready()
            _await_beats(plane)


@contextmanager
def _asleep(plane: ControlPlane) -> Iterator[None]:
    for name in _CONTROLLERS:
        plane.processes[name].send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for name in _CONTROLLERS:
            plane.processes[name].send_signal(signal.SIGCONT)


def _beats(plane: ControlPlane) -> dict[str, str]:
    """By name of each node that is ready: its last heartbeat, to the second."""
    with plane.client() as client:
        nodes = client.get("/api/v1/nodes").raise_for_status().json()["items"]
    ready = [(node, each) for node in nodes for each in node["status"]["conditions"] if each["type"] == "Ready"]
    return {node["metadata"]["name"]: each["lastHeartbeatTime"] for node, each in ready if each["status"] == "True"}


def _await_beats(plane: ControlPlane) -> None:
    """Of every node one that comes from now on: one from just before the outage is none, however late it was seen.

    A node that died shortly before the outage is waited for no longer than the controllers would wait for it.
    """
    before = _beats(plane)
    deadline = time.monotonic() + NODE_LOST_SECONDS
    while _beats(plane).items() & before.items() and time.monotonic() < deadline:
        time.sleep(0.1)
