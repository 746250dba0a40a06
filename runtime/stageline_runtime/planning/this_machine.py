"""This machine as the hardware of a plan: its memory as the stages would measure it, its speed as a rough estimate.

Memory is read from the operating system. Bandwidth and compute are the `cpu-core` preset times the cores that each
stage gets, which no one measured here.
"""

import os
from typing import Final

from stageline_runtime.planning.devices import CPU_CORE, ComputeRate, Device, Hardware, Link
from stageline_runtime.stage.memory import available_bytes

NAME: Final = "this machine"

LOOPBACK: Final = Link(bandwidth_bytes_per_second=2e9, latency_seconds=0.0001)
"""Gloo over the loopback device, an estimate."""


def this_machine(stage_count: int) -> Hardware:
    """All stages on this host, sharing its memory and its cores evenly."""
    cores = len(os.sched_getaffinity(0)) / stage_count
    rate = CPU_CORE.flops_per_second
    device = Device(
        name=NAME,
        memory_bytes=available_bytes(),
        memory_bandwidth_bytes_per_second=CPU_CORE.memory_bandwidth_bytes_per_second * cores,
        flops_per_second=ComputeRate(bfloat16=rate.bfloat16 * cores, float32=rate.float32 * cores),
        step_overhead_seconds=CPU_CORE.step_overhead_seconds,
        host=NAME,
    )
    return Hardware(devices=(device,) * stage_count, link=LOOPBACK)
