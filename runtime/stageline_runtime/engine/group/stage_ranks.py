"""Combines the reports of a stage's ranks into one for the stage: hellos, measurements, devices.

Pure. Ranks of a stage are in one container; either each has a device of its own, or none has.
"""

from collections.abc import Mapping

import msgspec

from stageline_api.failures import FailureClass
from stageline_api.runtime_config import RuntimeConfig
from stageline_runtime.plan_bus.messages import Hello, Measured, Place
from stageline_runtime.termination import RuntimeFailure


def hellos_of_stages(hellos: Mapping[Place, Hello]) -> dict[int, Hello]:
    """Each stage's report: its first rank's hello, with the memory of the rank that has the least.

    Ranks of a stage are in one container, so they load the same files and share one machine.
    """
    least: dict[int, int] = {}
    for place, hello in hellos.items():
        least[place.stage] = min(least.get(place.stage, hello.available_bytes), hello.available_bytes)
    return {
        place.stage: msgspec.structs.replace(hello, available_bytes=least[place.stage])
        for place, hello in hellos.items()
        if place.rank == 0
    }


def measured_of_stages(measured: Mapping[Place, Measured]) -> dict[int, Measured]:
    """What each stage measured: the most of any of its ranks, each of which has a device as large as the smallest."""
    most: dict[int, Measured] = {}
    for place, found in measured.items():
        so_far = most.get(place.stage, found)
        held, step = max(so_far.held_bytes, found.held_bytes), max(so_far.step_bytes, found.step_bytes)
        most[place.stage] = Measured(place.stage, held, step)
    return most


def check_devices_of_ranks(hellos: Mapping[Place, Hello], config: RuntimeConfig) -> None:
    """Check that the ranks of a stage have a device each, or none of them has one.

    Raises:
        RuntimeFailure: class BadConfig, naming two ranks that differ, or that share a device.
    """
    first: dict[int, Hello] = {}
    taken: dict[tuple[int, str], int] = {}
    for place, hello in sorted(hellos.items(), key=lambda each: (each[0].stage, each[0].rank)):
        beside = first.setdefault(place.stage, hello)
        if bool(hello.device) != bool(beside.device):
            has, lacks = (0, place.rank) if beside.device else (place.rank, 0)
            rule = (
                f"rank {has} of stage {place.stage} has a device and rank {lacks} has none: give the stage one for "
                "each rank (resources nvidia.com/gpu), or set engine.device to cpu"
            )
            raise refused_ranks(config, rule)
        other = taken.setdefault((place.stage, hello.device), place.rank)
        if hello.device and other != place.rank:
            rule = (
                f"ranks {other} and {place.rank} of stage {place.stage} share {hello.device}, and NCCL takes one rank "
                "a device"
            )
            raise refused_ranks(config, rule)


def refused_ranks(config: RuntimeConfig, rule: str) -> RuntimeFailure:
    """Why the requested number of ranks isn't available, naming the field that requests it."""
    tensor, experts = config.tensor_ranks, config.expert
    field = f"spec.parallelism.expert {experts}" if experts > 1 else f"spec.parallelism.tensor {tensor}"
    return RuntimeFailure(FailureClass.BAD_CONFIG, f"{field}: {rule}", operation="check the ranks")
