"""Hardware of stages: memory, bandwidth, compute rate and the link between stages; presets, and devices files.

Presets hold vendors' published peaks, so predictions from them are a bound that real kernels stay under;
`docs/planning.md` gives the source of each figure. A devices file has `stages`, one entry for all stages alike or one
for each, and `link`. An entry may start from a preset and change fields of it. Unknown, missing or out-of-range fields
are rejected with file, field, value and rule.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from stageline_api.errors import USAGE_EXIT_CODE, UserError
from stageline_api.manifests.manifest_loader import refuse
from stageline_api.manifests.strict_yaml import UnreadableYamlError, read_documents
from stageline_api.manifests.validation_problems import problems_of
from stageline_api.resource.base import ShortText, SpecBase
from stageline_api.resource.field_problem import FieldProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeRate:
    """Floating-point operations per second of dense matrix products, by dtype; a multiply-add is two."""

    float32: float
    bfloat16: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
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

SHARED_MEMORY_SUM_SECONDS: Final = 5e-6
SHARED_MEMORY_SUM_SECONDS_PER_ELEMENT: Final = 1.9e-9
"""A sum over two ranks through shared memory, bfloat16, a core of an EPYC each: medians of 5.1 µs for `[1, 576]`, 9.3
for `[8, 576]`, 76 for `[8, 4096]` and 503 for `[64, 4096]`."""
DEVICE_SUM_SECONDS: Final = 2e-5
"""A sum over the devices of one machine, an assumption."""

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
        _gpu("b200-180gb", 180, 8000, 2250, 75),
    )
}


def hardware_from_preset(name: str, stage_count: int) -> Hardware:
    """Every stage on a device of its own; `name` is a key of `PRESETS`."""
    return Hardware(devices=(PRESETS[name],) * stage_count, link=TEN_GIGABIT if name == CPU_CORE.name else GPU_LINK)


def all_reduce_guess(elements: int, *, on_devices: bool) -> float:
    """Estimated seconds of a sum over a stage's ranks of a tensor with so many elements, without a measurement."""
    if on_devices:
        return DEVICE_SUM_SECONDS
    return SHARED_MEMORY_SUM_SECONDS + SHARED_MEMORY_SUM_SECONDS_PER_ELEMENT * elements


_FACTORS: Final = {"": 1.0} | {
    letter + binary: (1024.0 if binary else 1000.0) ** power
    for power, letter in enumerate("KMGTP", start=1)
    for binary in ("", "i")
}
_AMOUNT: Final = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)([KMGTP]i?)?", re.ASCII)
_LARGEST: Final = 1e18
_LONGEST_SECONDS: Final = 60


def _amount(value: Any) -> float:
    """`80Gi`, `3.35T` or a plain number, between one and 1e18."""
    amount = 0.0
    if isinstance(value, int | float) and not isinstance(value, bool):
        amount = float(value) if abs(value) < _LARGEST else 0.0
    elif isinstance(value, str) and (match := _AMOUNT.fullmatch(value)) is not None:
        amount = float(match[1]) * _FACTORS[match[2] or ""]
    if not 1.0 <= amount <= _LARGEST:
        raise ValueError('must be a number from 1 to 1e18, or one with a suffix such as "80Gi" or "3.35T"')
    return amount


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LONGEST_SECONDS:
        raise ValueError(f"must be a number of seconds from 0 to {_LONGEST_SECONDS}")
    return float(value)


def _known_preset(name: str) -> str:
    if name not in PRESETS:
        raise ValueError(f"must be one of {', '.join(PRESETS)}")
    return name


Amount = Annotated[float, BeforeValidator(_amount)]
Seconds = Annotated[float, BeforeValidator(_seconds)]


class ComputeRateEntry(SpecBase):
    float32: Amount = Field(description="Operations per second in float32. Required.")
    bfloat16: Amount = Field(description="Operations per second in bfloat16. Required.")


class DeviceEntry(SpecBase):
    """One entry of `stages`: a whole device, or a preset and what differs from it."""

    preset: Annotated[str, AfterValidator(_known_preset)] | None = Field(
        default=None, description="Name of a preset whose figures hold where this entry gives none."
    )
    name: ShortText | None = Field(default=None, description="What the plan calls the device.")
    memory_bytes: Amount | None = Field(default=None, description="Memory that is free for the stage.")
    memory_bandwidth_bytes_per_second: Amount | None = Field(default=None, description="How fast it reads memory.")
    flops_per_second: ComputeRateEntry | None = Field(
        default=None, description="Floating-point operations per second of dense products, by dtype."
    )
    step_overhead_seconds: Seconds | None = Field(
        default=None, description="What a step takes however small it is, at most 60 s."
    )
    host: ShortText | None = Field(default=None, description="Stages that name the same host share its memory.")

    def missing_fields(self) -> list[str]:
        """Fields that are neither given nor in a preset, as a file spells them."""
        needed = {
            "memoryBytes": self.memory_bytes,
            "memoryBandwidthBytesPerSecond": self.memory_bandwidth_bytes_per_second,
            "flopsPerSecond": self.flops_per_second,
        }
        return [] if self.preset is not None else [name for name, value in needed.items() if value is None]

    def device(self) -> Device:
        """The device, the preset's fields filled in; none may be missing."""
        rate = self.flops_per_second
        fields: dict[str, Any] = {
            "name": self.name or self.preset or "custom",
            "memory_bytes": None if self.memory_bytes is None else int(self.memory_bytes),
            "memory_bandwidth_bytes_per_second": self.memory_bandwidth_bytes_per_second,
            "flops_per_second": None if rate is None else ComputeRate(float32=rate.float32, bfloat16=rate.bfloat16),
            "step_overhead_seconds": self.step_overhead_seconds,
            "host": self.host,
        }
        given = {name: value for name, value in fields.items() if value is not None}
        if self.preset is not None:
            return replace(PRESETS[self.preset], **given)
        return Device(**({"step_overhead_seconds": GPU_STEP_OVERHEAD_SECONDS} | given))


class LinkEntry(SpecBase):
    bandwidth_bytes_per_second: Amount = Field(
        default=TEN_GIGABIT.bandwidth_bytes_per_second, description="Bytes per second. Default: 10 Gbit/s."
    )
    latency_seconds: Seconds = Field(
        default=TEN_GIGABIT.latency_seconds, description="Time of an empty message. Default: 0.1 ms."
    )


class DevicesFile(SpecBase):
    stages: Annotated[tuple[DeviceEntry, ...], Field(strict=False)] = Field(
        max_length=64, description="One entry for all stages, or one for each in stage order. Required."
    )
    link: LinkEntry = Field(default=LinkEntry(), description="The way from one stage to the next.")


def read_hardware(path: Path, stage_count: int) -> Hardware:
    """The devices of a file, one for each stage.

    Raises:
        UserError: exit status 2, one line for each problem: file, field, value and rule.
    """
    parsed = _parse(path)
    refuse([problem.placed(str(path), None) for problem in _problems(parsed, stage_count)])
    devices = tuple(entry.device() for entry in parsed.stages)
    return Hardware(
        devices=devices * (stage_count // len(devices)),
        link=Link(
            bandwidth_bytes_per_second=parsed.link.bandwidth_bytes_per_second,
            latency_seconds=parsed.link.latency_seconds,
        ),
    )


def _parse(path: Path) -> DevicesFile:
    try:
        documents = [document for _, document in read_documents(path)]
    except UnreadableYamlError as error:
        raise UserError(f"{path}: {error}", USAGE_EXIT_CODE) from None
    if len(documents) != 1 or not isinstance(documents[0], dict):
        raise UserError(f"{path}: must hold one mapping, with stages and link", USAGE_EXIT_CODE)
    try:
        return DevicesFile.model_validate(documents[0])
    except ValidationError as error:
        lines = [str(problem.placed(str(path), None)) for problem in problems_of(error, DevicesFile)]
        raise UserError("\n".join(lines), USAGE_EXIT_CODE) from None


def _problems(parsed: DevicesFile, stage_count: int) -> list[FieldProblem]:
    count = len(parsed.stages)
    if count not in (1, stage_count):
        entries = "1 entry" if stage_count == 1 else f"1 entry or {stage_count}, one for each stage of the pipeline"
        return [FieldProblem(path="stages", value=f"a list of {count}", rule=f"must have {entries}")]
    return [
        FieldProblem(path=f"stages[{index}].{name}", rule="is required where there is no preset")
        for index, entry in enumerate(parsed.stages)
        for name in entry.missing_fields()
    ]
