"""What follows for the group from the devices its stages have: how tensors cross, and what `auto` captures. Pure.

Decided once by the engine and told to all stages, so that no two of them can disagree.
"""

from collections.abc import Iterable

from stageline_runtime.graphs.mode import resolve_graphs
from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.plan_bus.messages import GraphMode, Hello, TransportKind


def choose_transport(hellos: Iterable[Hello]) -> TransportKind:
    """`nccl` between stages that have a device each; it refuses two ranks on one, so then tensors are staged."""
    devices = [hello.device for hello in hellos]
    if not any(devices):
        return TransportKind.GLOO
    if all(devices) and len(set(devices)) == len(devices):
        return TransportKind.NCCL
    return TransportKind.STAGED


def choose_graphs(asked: str, hellos: Iterable[Hello], model: ModelConfig) -> GraphMode:
    """The most that the group captures; a mixture of experts can't be captured, so `auto` doesn't ask for it."""
    capturable = all(hello.device for hello in hellos) and model.mixture is None
    return resolve_graphs(asked, auto=GraphMode.FULL if capturable else GraphMode.OFF)


def memory_owner(hello: Hello) -> str:
    """Whose memory the stage's `available_bytes` is: stages with the same owner share it."""
    return hello.device or hello.host
