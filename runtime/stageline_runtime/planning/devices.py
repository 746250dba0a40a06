"""What stages run on: memory, bandwidth, compute rate and the link between stages, and presets of known devices. Pure.

Presets hold vendors' published peaks, so what is predicted from them is a bound that real kernels stay under;
`docs/planning.md` says where each figure comes from.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeRate:
    """Floating-point operations per second of dense matrix products, by dtype; a multiply-add is two."""

    float32: float
    bfloat16: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What one stage runs on."""

    name: str
    memory_bytes: int
    memory_bandwidth_bytes_per_second: float
    flops_per_second: ComputeRate
    step_overhead_seconds: float
    """What a step takes however small it is: launches, plan handling. Always an estimate."""
    host: str | None = None
    """Stages with the same host share the smallest `memory_bytes` among them; None is a host of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The way from one stage to the next."""

    bandwidth_bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The devices of all stages, in stage order, and the link between them."""

    devices: tuple[Device, ...]
    link: Link


TEN_GIGABIT: Final = Link(bandwidth_bytes_per_second=1.25e9, latency_seconds=0.0001)
"""The link of CPU stages and of a devices file that names none, an assumption."""

GPU_LINK: Final = Link(bandwidth_bytes_per_second=25e9, latency_seconds=0.00003)
"""A network of 200 Gbit/s between nodes, the link of GPU presets, an assumption."""

GPU_STEP_OVERHEAD_SECONDS: Final = 0.0005
CPU_STEP_OVERHEAD_SECONDS: Final = 0.001


def _gpu(name: str, gigabytes: int, bandwidth: float, bfloat16: float, float32: float) -> Device:
    """Takes the data sheets' own units: GB, GB/s, and teraFLOPS without sparsity."""
    return Device(
        name=name,
        memory_bytes=gigabytes * 10**9,
        memory_bandwidth_bytes_per_second=bandwidth * 1e9,
        flops_per_second=ComputeRate(bfloat16=bfloat16 * 1e12, float32=float32 * 1e12),
        step_overhead_seconds=GPU_STEP_OVERHEAD_SECONDS,
    )


CPU_CORE: Final = Device(
    name="cpu-core",
    memory_bytes=4 << 30,
    memory_bandwidth_bytes_per_second=15e9,
    flops_per_second=ComputeRate(bfloat16=200e9, float32=80e9),
    step_overhead_seconds=CPU_STEP_OVERHEAD_SECONDS,
)
"""A server core with AVX-512, an estimate: rounded down from oneDNN products on one EPYC core."""

PRESETS: Final[dict[str, Device]] = {
    device.name: device
    for device in (
        CPU_CORE,
        _gpu("l4-24gb", 24, 300, 121, 30.3),
        _gpu("a100-80gb", 80, 2039, 312, 19.5),
        _gpu("h100-80gb", 80, 3350, 989, 67),
        _gpu("h200-141gb", 141, 4800, 989, 67),
    )
}


def hardware_from_preset(name: str, stage_count: int) -> Hardware:
    """Every stage on a device of its own; `name` is a key of `PRESETS`."""
    return Hardware(devices=(PRESETS[name],) * stage_count, link=TEN_GIGABIT if name == CPU_CORE.name else GPU_LINK)
