"""The plan of one group: the cut that its engine will make, what it will do, and a cut that would be faster. Pure.

The cut comes from the very code that the engine runs, so that a plan never shows another one. The engine takes its
stages for equally fast; where the described devices say otherwise, the faster cut is for a person to write down.
"""

from dataclasses import dataclass

from stageline_api.runtime_config import LayerRange
from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.planning.cut import CutCosts, NoRoomError, cut_for_devices, cut_layers, engine_costs
from stageline_runtime.planning.devices import Hardware
from stageline_runtime.planning.memory import GroupMemory
from stageline_runtime.planning.predict import (
    Prediction,
    Workload,
    group_memory,
    predict,
    ranks_that_do_not_pay,
    step_seconds,
)

WORTH_WRITING = 1.02
"""How much faster another cut must be predicted before it is shown; below that the prediction knows too little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    cut: tuple[LayerRange, ...]
    is_explicit: bool
    prediction: Prediction
    no_room: str | None
    """Why the engine would refuse to cut; the cut shown is then the one it would make with enough memory."""
    faster_cut: tuple[LayerRange, ...] | None
    faster_tokens_per_second: float | None
    ranks_do_not_pay: str | None
    """A sentence, where a stage's ranks take as long as one would."""


def plan_group(
    config: ModelConfig,
    hardware: Hardware,
    workload: Workload,
    explicit: tuple[LayerRange, ...] | None,
    one_rank: Hardware | None = None,
) -> GroupPlan:
    """Cut and predict; raises CutError where the stages or the explicit ranges don't fit the model's layers.

    `hardware` is what each rank of a stage runs on, `one_rank` what a lone one would, where that is something else.
    """
    no_room = None
    try:
        cut = _engine_cut(config, hardware, workload, explicit, group_memory(config, hardware, workload))
    except NoRoomError as error:
        no_room = str(error)
        cut = _engine_cut(config, hardware, workload, explicit, None)
    prediction = predict(config, cut, hardware, workload)
    faster = None if prediction.tokens_per_second is None else _faster_cut(config, hardware, workload, prediction)
    return GroupPlan(
        cut=cut,
        is_explicit=explicit is not None,
        prediction=prediction,
        no_room=no_room,
        faster_cut=None if faster is None else faster[0],
        faster_tokens_per_second=None if faster is None else faster[1],
        ranks_do_not_pay=ranks_that_do_not_pay(config, cut, hardware, workload, one_rank),
    )


def _engine_cut(
    config: ModelConfig,
    hardware: Hardware,
    workload: Workload,
    explicit: tuple[LayerRange, ...] | None,
    memory: GroupMemory | None,
) -> tuple[LayerRange, ...]:
    """What ranks' exchanges take the engine guesses, whatever was measured."""
    costs = engine_costs(config, ranks=workload.ranks, experts=workload.experts, on_devices=workload.on_devices)
    return cut_layers(
        config.num_layers,
        len(hardware.devices),
        layer_cost=costs.layer,
        embedding_cost=costs.embedding,
        head_cost=costs.head,
        explicit=explicit,
        memory=memory,
    )


def _faster_cut(
    config: ModelConfig, hardware: Hardware, workload: Workload, prediction: Prediction
) -> tuple[tuple[LayerRange, ...], float] | None:
    """The cut by predicted seconds on each stage's own device and its tokens per second, where it pays."""
    rows = prediction.rows_per_step
    costs = tuple(_device_costs(config, hardware, workload, rows, stage) for stage in range(len(hardware.devices)))
    try:
        cut = cut_for_devices(config.num_layers, costs, memory=group_memory(config, hardware, workload))
    except NoRoomError:
        return None
    other = predict(config, cut, hardware, workload).tokens_per_second
    now = prediction.tokens_per_second
    return (cut, other) if other is not None and now is not None and other > WORTH_WRITING * now else None


def _device_costs(config: ModelConfig, hardware: Hardware, workload: Workload, rows: int, stage: int) -> CutCosts:
    """Seconds of the parts on one stage's device, as differences of its predicted step times."""
    device = hardware.devices[stage]

    def seconds(*, is_first: bool = False, is_last: bool = False) -> float:
        one_layer = LayerRange(first=0, last=0)
        return step_seconds(config, one_layer, device, workload, rows, is_first=is_first, is_last=is_last)

    layer = seconds()
    return CutCosts(
        layer=layer - device.step_overhead_seconds,
        embedding=seconds(is_first=True) - layer,
        head=seconds(is_last=True) - layer,
    )
