"""`python -m cluster.kubelet`: the process node as a cluster's kubelet, one node of a test cluster until told to end.

Pods that the real scheduler binds to its node run as local processes.
"""

import argparse
import asyncio
import contextlib
import logging
import signal
from pathlib import Path

from cluster.kubelet.agent import NodeAgent
from cluster.kubelet.api_access import read_kubeconfig
from cluster.kubelet.api_client import ApiClient
from cluster.kubelet.node_objects import NodeIdentity
from stageline_local.node.images import LocalImages, machine_environment


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE")
    return name, value


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m cluster.kubelet", description=__doc__)
    parser.add_argument("--node", required=True, help="name of the node")
    parser.add_argument("--kubeconfig", required=True, type=Path)
    parser.add_argument("--state-dir", required=True, type=Path, help="where pods keep files and logs")
    parser.add_argument("--image", action="append", default=[], help="an image that this node can run (repeatable)")
    parser.add_argument("--capacity", action="append", default=[], type=_pair, help="as in cpu=4 or nvidia.com/gpu=1")
    parser.add_argument("--label", action="append", default=[], type=_pair)
    return parser.parse_args()


async def _run(arguments: argparse.Namespace) -> None:
    access = read_kubeconfig(arguments.kubeconfig)
    capacity = {"cpu": "64", "memory": "256Gi", "pods": "110", **dict(arguments.capacity)}
    identity = NodeIdentity(arguments.node, capacity, dict(arguments.label))
    images = LocalImages(frozenset(arguments.image), machine_environment())
    arguments.state_dir.mkdir(parents=True, exist_ok=True)
    async with ApiClient(access) as client:
        agent = asyncio.create_task(NodeAgent(identity, client, access, arguments.state_dir, images).run())
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, agent.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await agent


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # Every call to the API server would be a line.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    asyncio.run(_run(_arguments()))
