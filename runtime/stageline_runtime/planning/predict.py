"""What a cut will do on given devices: memory, step times, bubble and tokens per second of steady decode. Pure.

A model of the hardware, not a measurement: it knows peaks and bytes, not kernels. Its formulas are in the docstrings.
It assumes decode at full cohorts, every sequence at the same context, and steps that take the same time each round.
"""

from dataclasses import dataclass, replace

from stageline_api.runtime_config import LayerRange
from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.model_facts.model_shapes import end_parameters, layer_size
from stageline_runtime.model_facts.rank_cut import head_rows, part_of_layers
from stageline_runtime.planning.devices import Device, Hardware, Link
from stageline_runtime.planning.memory import (
    ELEMENT_BYTES,
    GroupMemory,
    HostMemory,
    LargestStep,
    StageRoom,
    hosts_of,
)

_LOGIT_BYTES = 4
_TOKEN_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    dtype: str
    """`float32` or `bfloat16`."""
    max_model_len: int
    num_sequences: int
    """Sequences decoded at once, over all cohorts; fewer where the cache doesn't hold them."""
    context_tokens: int
    """Tokens that each sequence has in the cache."""
    max_step_tokens: int = 512
    """Most tokens of a step (`spec.engine.maxNumBatchedTokens`)."""
    on_devices: bool = False
    """Whether the memory belongs to devices, which no other process uses."""
    draft: ModelConfig | None = None
    """The model that the last stage drafts with. Its time is not predicted."""
    ranks: int = 1
    """Of each stage, on devices like the stage's, or on parts of its host that are each as fast as the device given."""
    experts: int = 1
    """Ranks of each stage, where they share the experts alone and each has sequences of its own; not with `ranks`."""
    all_reduce_seconds: float = 0.0
    """Measured latency of one exchange of a stage's ranks: a sum, or of `experts` a gather or a scattered sum."""

    @property
    def stage_ranks(self) -> int:
        return self.ranks * self.experts

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePrediction:
    stage: int
    device: str
    layers: LayerRange
    weight_bytes: int
    usable_bytes: int
    """What the stages of its host may take together."""
    missing_bytes: int
    """What its host lacks for weights, largest step and smallest cache of all its stages; 0 when they fit."""
    kv_capacity_tokens: int
    """Tokens of KV cache that its host, or the devices of all its ranks, hold beside weights and largest step."""
    step_seconds: float
    bubble: float
    """Share of the time in which this stage does nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    stages: tuple[StagePrediction, ...]
    admitted_sequences: int
    """At most `num_sequences`; 0 when a stage can't hold its part."""
    rows_per_step: int
    """Sequences of one cohort, for which the step times are; of the asked-for ones when nothing fits."""
    loop_seconds: float
    """Latency of the token loop outside the stages: all hops and the feedback."""
    round_seconds: float
    """From one step of a cohort to its next: the time per output token."""
    imbalance_bubble: float
    """What uneven stages cost alone."""
    loop_bubble: float
    """What the token loop's latency costs alone."""
    bubble: float
    """Mean over the stages, of both together."""
    tokens_per_second: float | None
    """None when a stage can't hold its part."""


def group_memory(config: ModelConfig, hardware: Hardware, workload: Workload) -> GroupMemory:
    """The devices' memory as the cut and the cache are held against it; a device without a host is its own."""
    rooms = tuple(
        StageRoom(
            host=device.host or f"device of stage {stage}",
            available_bytes=device.memory_bytes,
            is_device=workload.on_devices,
        )
        for stage, device in enumerate(hardware.devices)
    )
    return GroupMemory(
        config=config,
        rooms=rooms,
        max_model_len=workload.max_model_len,
        largest_step=LargestStep(
            tokens=workload.max_step_tokens, rows=min(workload.num_sequences, workload.max_step_tokens)
        ),
        element_bytes=workload.element_bytes,
        draft=workload.draft,
        ranks=workload.ranks,
        experts=workload.experts,
    )


def predict(config: ModelConfig, cut: tuple[LayerRange, ...], hardware: Hardware, workload: Workload) -> Prediction:
    """Predict steady decode of `cut` on `hardware`.

    With step times t of P stages, loop latency L and k busy cohorts (P of them, fewer with fewer sequences) one round
    takes max(k * max(t), sum(t) + L): either the slowest stage is never idle, or each cohort goes round as fast as the
    loop lets it. The bubble is what the stages don't fill of it, 1 - k * sum(t) / (P * round); for k = P and equal
    stages that is L / (P * t + L), and for L = 0 it is 1 - mean(t) / max(t).
    """
    stage_count = len(cut)
    hosts = hosts_of(group_memory(config, hardware, workload).stages_of(cut))
    admitted = _admitted(hosts, workload)
    rows = -(-(admitted or workload.num_sequences) // stage_count)
    times = [
        step_seconds(config, layers, device, workload, rows, is_first=stage == 0, is_last=stage == stage_count - 1)
        for stage, (layers, device) in enumerate(zip(cut, hardware.devices, strict=True))
    ]
    loop = loop_seconds(config, hardware.link, workload.element_bytes, rows, stage_count)
    busy_cohorts = min(stage_count, admitted or workload.num_sequences)
    total, slowest = sum(times), max(times)
    round_seconds = max(busy_cohorts * slowest, total + loop)
    bubbles = [1.0 - busy_cohorts * time / round_seconds for time in times]
    return Prediction(
        stages=_stages(hosts, cut, hardware, workload, times, bubbles),
        admitted_sequences=admitted,
        rows_per_step=rows,
        loop_seconds=loop,
        round_seconds=round_seconds,
        imbalance_bubble=1.0 - total / (stage_count * slowest),
        loop_bubble=loop / (total + loop),
        bubble=sum(bubbles) / stage_count,
        tokens_per_second=admitted / round_seconds if admitted else None,
    )


def step_seconds(
    config: ModelConfig,
    layers: LayerRange,
    device: Device,
    workload: Workload,
    rows: int,
    *,
    is_first: bool,
    is_last: bool,
) -> float:
    """Time of one decode step of `rows` sequences: the roofline plus the device's fixed overhead.

    max(bytes read / memory bandwidth, floating-point operations / compute rate): Williams, Waterman and Patterson,
    "Roofline", Communications of the ACM 52(4), 2009. Bytes: the weights once (of the embedding only the rows' own
    vectors), each row's keys and values, and on the last stage the float32 logits, written and read. Operations: two
    per weight and row, and four per row, context token and element of all query heads (scores and weighted sum).
    Of several ranks it is the time of each, and of its exchanges: one that shares each layer has its part of layers and
    head, one that shares experts its part of the rows, and of the experts' work for all rows, taken to be even.
    """
    config = part_of_layers(config, workload.ranks)
    vocab_rows = head_rows(config.vocab_size, workload.ranks)
    ends = end_parameters(config, workload.ranks, is_first=False, is_last=is_last)
    experts = workload.experts
    own = -(-rows // experts)
    sizes = [layer_size(config, layer) for layer in range(layers.first, layers.last + 1)]
    weights = sum(size.plain + size.read_experts(rows) / experts for size in sizes)
    read = workload.element_bytes * (weights + ends + is_first * own * config.hidden_size)
    read += own * workload.context_tokens * config.kv_bytes_per_token(layers.count, workload.element_bytes)
    read += is_last * 2 * own * config.vocab_size * _LOGIT_BYTES
    attention = 4 * workload.context_tokens * config.num_heads * config.head_dim * layers.count
    operations = 2 * sum(own * size.matrices + rows * size.picked * size.expert / experts for size in sizes)
    operations += own * (2 * is_last * vocab_rows * config.hidden_size + attention)
    rate = device.flops_per_second.float32 if workload.dtype == "float32" else device.flops_per_second.bfloat16
    roofline = max(read / device.memory_bandwidth_bytes_per_second, operations / rate)
    return roofline + exchange_seconds(config, layers, workload) + device.step_overhead_seconds


def exchange_seconds(config: ModelConfig, layers: LayerRange, workload: Workload) -> float:
    """What a step waits for the exchanges of a stage's ranks: two a layer, of `experts` two a mixture."""
    if workload.stage_ranks == 1:
        return 0.0
    here = range(layers.first, layers.last + 1)
    exchanging = sum(workload.ranks > 1 or layer_size(config, layer).num_experts > 0 for layer in here)
    return 2 * exchanging * workload.all_reduce_seconds


def ranks_that_do_not_pay(
    config: ModelConfig,
    cut: tuple[LayerRange, ...],
    hardware: Hardware,
    workload: Workload,
    one_rank: Hardware | None = None,
) -> str | None:
    """A sentence where the slowest stage's step is not shorter with the workload's ranks than with one; else None.

    `one_rank` is what a stage's lone rank would run on, where that isn't one of `hardware`: all cores of its host.
    """
    if workload.stage_ranks == 1:
        return None
    rows = predict(config, cut, hardware, workload).rows_per_step
    shared = _slowest_step(config, cut, hardware, workload, rows)
    alone = _slowest_step(config, cut, one_rank or hardware, replace(workload, ranks=1, experts=1), rows)
    if shared < alone:
        return None
    exchanges = max(exchange_seconds(config, layers, workload) for layers in cut)
    what = "sums over the ranks" if workload.ranks > 1 else "gathering rows for experts and scattering their sums"
    return (
        f"{workload.stage_ranks} ranks a stage do not pay: the slowest stage's step of {rows} rows takes "
        f"{shared * 1e3:.2f} ms with them and {alone * 1e3:.2f} ms with one; "
        f"{what} take up to {exchanges * 1e3:.2f} ms of it"
    )


def _slowest_step(
    config: ModelConfig, cut: tuple[LayerRange, ...], hardware: Hardware, workload: Workload, rows: int
) -> float:
    return max(
        step_seconds(config, layers, device, workload, rows, is_first=stage == 0, is_last=stage == len(cut) - 1)
        for stage, (layers, device) in enumerate(zip(cut, hardware.devices, strict=True))
    )


def loop_seconds(config: ModelConfig, link: Link, element_bytes: int, rows: int, stage_count: int) -> float:
    """Latency of the token loop outside the stages: P - 1 hops of hidden `[rows, hidden_size]`, one of the tokens."""
    if stage_count == 1:
        return 0.0
    hop = link.latency_seconds + rows * config.hidden_size * element_bytes / link.bandwidth_bytes_per_second
    feedback = link.latency_seconds + rows * _TOKEN_BYTES / link.bandwidth_bytes_per_second
    return (stage_count - 1) * hop + feedback


def _admitted(hosts: tuple[HostMemory, ...], workload: Workload) -> int:
    """Sequences at once, as the engine sizes its cache, where one of `max_model_len` has room in each cache."""
    if any(host.missing_bytes(workload.max_model_len) > 0 for host in hosts):
        return 0
    of_each = min(host.cache_tokens for host in hosts) // workload.context_tokens
    return min(workload.num_sequences, workload.experts * of_each)


def _stages(
    hosts: tuple[HostMemory, ...],
    cut: tuple[LayerRange, ...],
    hardware: Hardware,
    workload: Workload,
    times: list[float],
    bubbles: list[float],
) -> tuple[StagePrediction, ...]:
    placed = {stage.stage: (stage, host) for host in hosts for stage in host.stages}
    return tuple(
        StagePrediction(
            stage=index,
            device=hardware.devices[index].name,
            layers=layers,
            weight_bytes=stage.weight_bytes // stage.num_ranks,
            usable_bytes=host.usable_bytes,
            missing_bytes=max(0, host.missing_bytes(workload.max_model_len)),
            kv_capacity_tokens=workload.experts * max(0, host.cache_tokens),
            step_seconds=times[index],
            bubble=bubbles[index],
        )
        for index, layers in enumerate(cut)
        for stage, host in [placed[index]]
    )
