"""How many elements a model's parts have. Pure: no torch.

Loading, cache sizing, the cut and the plan all count from the families' descriptions of layers, so that none of them
can disagree.
"""

from stageline_runtime.model_facts.families.registry import layer_of
from stageline_runtime.model_facts.hyperparameters import MixtureConfig, ModelConfig
from stageline_runtime.model_facts.model_coverage import MeasuredParameters
from stageline_runtime.model_facts.rank_cut import head_rows


def layer_parameters(config: ModelConfig, layer: int, *, experts: int = 1) -> int:
    """Elements of all tensors of a layer; of a mixture every expert's, or those that one of `experts` ranks holds."""
    if config.is_covered:
        return _measured(config).layers[layer]
    held = sum(tensor.num_elements for tensor in layer_of(config, layer).tensors())
    if mixture := mixture_of(config, layer):
        held -= (mixture.num_experts - mixture.num_experts // experts) * expert_parameters(config, mixture)
    return held


def active_parameters(config: ModelConfig, layer: int) -> int:
    """Multiply-adds of one token in a layer's matrices: of a mixture, the router and the experts that it picks."""
    if config.is_covered:
        return _measured(config).layers[layer]
    tensors = layer_of(config, layer).tensors()
    matrices = sum(tensor.num_elements for tensor in tensors if len(tensor.shape) > 1)
    if mixture := mixture_of(config, layer):
        matrices -= (mixture.num_experts - mixture.experts_per_token) * expert_parameters(config, mixture)
    return matrices


def read_parameters(config: ModelConfig, layer: int, rows: int) -> int:
    """Elements of a layer that a step of `rows` tokens reads from memory.

    Of a mixture, the experts that at least one token picks, expected under even routing: `E (1 - (1 - k/E)^rows)`.
    """
    total = layer_parameters(config, layer)
    if mixture := mixture_of(config, layer):
        unpicked = mixture.num_experts * (1 - mixture.experts_per_token / mixture.num_experts) ** rows
        total -= int(unpicked * expert_parameters(config, mixture))
    return total


def end_parameters(config: ModelConfig, ranks: int = 1, *, is_first: bool, is_last: bool) -> int:
    """Elements that one of a stage's `ranks` holds for being the first (embedding) or the last (final norm, its rows of
    the head)."""
    if config.is_covered:
        ends = _measured(config)
        holds_front = is_first or (is_last and ends.is_tied)
        return holds_front * ends.front + is_last * ends.tail
    # A tied matrix counts twice even on a lone stage: dense for look-ups, packed for the head.
    rows = is_first * config.vocab_size + is_last * (head_rows(config.vocab_size, ranks) + 1)
    return rows * config.hidden_size


def mixture_of(config: ModelConfig, layer: int) -> MixtureConfig | None:
    """The layer's mixture of experts; None where its feed-forward block is dense."""
    mixture = config.mixture
    return mixture if mixture is not None and mixture.sparse_layers[layer] else None


def expert_parameters(config: ModelConfig, mixture: MixtureConfig) -> int:
    """Elements of one routed expert in a layer: gate, up and down."""
    return 3 * config.hidden_size * mixture.intermediate_size


def _measured(config: ModelConfig) -> MeasuredParameters:
    assert config.measured is not None, "a covered model is planned for only with its sizes"
    return config.measured
