"""How many elements a model's parts have. Pure: no torch.

The cut, memory and predicted times all count from the families' descriptions of layers, so that none of them can
disagree.
"""

from dataclasses import dataclass

from stageline_runtime.model_facts.families.registry import layer_of
from stageline_runtime.model_facts.hyperparameters import ModelConfig
from stageline_runtime.model_facts.layer import Cut
from stageline_runtime.model_facts.model_coverage import MeasuredParameters
from stageline_runtime.model_facts.rank_cut import head_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSize:
    """Elements of a layer's weights."""

    plain: int
    """Outside of experts that a router picks among."""
    matrices: int
    """Of these, the ones in matrices: each is a multiply-add of a token."""
    expert: int = 0
    """Of each routed expert."""
    num_experts: int = 0
    picked: int = 0
    """Experts of a token."""

    @property
    def active(self) -> int:
        """Multiply-adds of one token."""
        return self.matrices + self.picked * self.expert

    def held(self, experts: int = 1) -> int:
        """What one of `experts` ranks that share the routed experts holds."""
        return self.plain + self.num_experts // experts * self.expert

    def read_experts(self, rows: int) -> float:
        """Elements of routed experts that a step of `rows` tokens reads: of those that at least one token picks,
        expected under even routing, `E (1 - (1 - k/E)^rows)`."""
        if not self.num_experts:
            return 0.0
        return self.expert * self.num_experts * (1 - (1 - self.picked / self.num_experts) ** rows)


def layer_size(config: ModelConfig, layer: int) -> LayerSize:
    if config.is_covered:
        elements = _measured(config).layers[layer]
        return LayerSize(plain=elements, matrices=elements)
    tensors = layer_of(config, layer).tensors()
    plain = [tensor for tensor in tensors if tensor.cut is not Cut.BY_EXPERTS]
    size = sum(tensor.num_elements for tensor in plain)
    matrices = sum(tensor.num_elements for tensor in plain if len(tensor.shape) > 1)
    mixture = config.mixture
    if mixture is None or len(plain) == len(tensors):
        return LayerSize(plain=size, matrices=matrices)
    routed = sum(tensor.num_elements for tensor in tensors) - size
    return LayerSize(
        plain=size,
        matrices=matrices,
        expert=routed // mixture.num_experts,
        num_experts=mixture.num_experts,
        picked=mixture.experts_per_token,
    )


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


def _measured(config: ModelConfig) -> MeasuredParameters:
    assert config.measured is not None, "a covered model is planned for only with its sizes"
    return config.measured
