"""Costs of a model's parts for stages of several ranks, as the engine's cut takes them. Pure.

The engine divides layers before any rank has started, so no latency of an exchange is measured yet: it takes the guess
for ranks of its kind, in multiply-adds of a decode step of `DECODE_ROWS` rows, which reads weights at a preset's
bandwidth. `stageline plan` cuts by the same costs, and shows a faster cut where a measured latency makes one.
"""

from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.model_facts.model_shapes import layer_size
from stageline_runtime.planning.cut import DECODE_ROWS, CutCosts, costs_of_ranks, estimate_costs
from stageline_runtime.planning.devices import CPU_CORE, PRESETS, all_reduce_guess

_WEIGHT_BYTES = 2
_DEVICE = PRESETS["a100-80gb"]


def engine_costs(config: ModelConfig, *, ranks: int = 1, experts: int = 1, on_devices: bool = False) -> CutCosts:
    """Of stages whose layers are shared by `ranks`, or whose experts alone by `experts`; one of the two is 1."""
    costs = estimate_costs(config, experts)
    exchanges = _exchanges_a_layer(config, ranks, experts) * _exchange_cost(config, on_devices=on_devices)
    return costs_of_ranks(costs, ranks, exchanges)


def _exchanges_a_layer(config: ModelConfig, ranks: int, experts: int) -> float:
    """Two in each layer that is shared, or in each mixture; a mean where layers differ."""
    if ranks > 1:
        return 2.0
    mixtures = sum(layer_size(config, layer).num_experts > 0 for layer in range(config.num_layers))
    return 2.0 * mixtures / config.num_layers if experts > 1 else 0.0


def _exchange_cost(config: ModelConfig, *, on_devices: bool) -> float:
    """Weights that a rank could read while one exchange of a step's rows goes on."""
    seconds = all_reduce_guess(DECODE_ROWS * config.hidden_size, on_devices=on_devices)
    device = _DEVICE if on_devices else CPU_CORE
    return seconds * device.memory_bandwidth_bytes_per_second / _WEIGHT_BYTES
