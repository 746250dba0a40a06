"""Names and shapes of the tensors of the own decoder, and how many elements they have. Pure: no torch.

Loading, cache sizing, the cut and the plan all count from this one list, so that none of them can disagree. Names are
Hugging Face's, with a layer's prefix left out and a mixture's experts stacked.
"""

from math import prod

from stageline_runtime.model_facts.model_config import MixtureConfig, ModelConfig
from stageline_runtime.model_facts.model_coverage import MeasuredParameters

ROUTER_NAME = "mlp.gate.weight"
EXPERT_GATE_UP_NAME = "mlp.experts.gate_up_proj"
EXPERT_DOWN_NAME = "mlp.experts.down_proj"
SHARED_NAME = "mlp.shared_expert"
SHARED_GATE_NAME = "mlp.shared_expert_gate.weight"
Shapes = dict[str, tuple[int, ...]]


def layer_tensor_shapes(config: ModelConfig, layer: int) -> Shapes:
    """Shapes of a layer's tensors by their name within the layer; matrices are `[out_features, in_features]`."""
    shapes: Shapes = {
        "input_layernorm.weight": (config.hidden_size,),
        "post_attention_layernorm.weight": (config.hidden_size,),
    }
    if config.qk_norm:
        shapes |= {f"self_attn.{head}_norm.weight": (config.head_dim,) for head in "qk"}
    return shapes | _attention(config) | _feed_forward(config, layer)


def layer_parameters(config: ModelConfig, layer: int) -> int:
    """Elements of all tensors of a layer, every expert of a mixture included."""
    if config.is_covered:
        return _measured(config).layers[layer]
    return _count(layer_tensor_shapes(config, layer))


def active_parameters(config: ModelConfig, layer: int) -> int:
    """Multiply-adds of one token in a layer's matrices: of a mixture, the router and the experts that it picks."""
    if config.is_covered:
        return _measured(config).layers[layer]
    matrices = _count({name: shape for name, shape in layer_tensor_shapes(config, layer).items() if len(shape) > 1})
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


def end_parameters(config: ModelConfig, *, is_first: bool, is_last: bool) -> int:
    """Elements a stage holds for being the first (embedding) or the last (final norm and head)."""
    if config.is_covered:
        ends = _measured(config)
        holds_front = is_first or (is_last and ends.is_tied)
        return holds_front * ends.front + is_last * ends.tail
    # A tied matrix counts twice even on a lone stage: dense for look-ups, packed for the head.
    matrices = int(is_first) + int(is_last)
    return matrices * config.vocab_size * config.hidden_size + int(is_last) * config.hidden_size


def mixture_of(config: ModelConfig, layer: int) -> MixtureConfig | None:
    """The layer's mixture of experts; None where its feed-forward block is dense."""
    mixture = config.mixture
    return mixture if mixture is not None and mixture.sparse_layers[layer] else None


def _measured(config: ModelConfig) -> MeasuredParameters:
    assert config.measured is not None, "a covered model is planned for only with its sizes"
    return config.measured


def _attention(config: ModelConfig) -> Shapes:
    query_size, key_value_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: Shapes = {"self_attn.o_proj.weight": (config.hidden_size, query_size)}
    if config.attention_output_bias:
        shapes["self_attn.o_proj.bias"] = (config.hidden_size,)
    for head, size in (("q", query_size), ("k", key_value_size), ("v", key_value_size)):
        shapes[f"self_attn.{head}_proj.weight"] = (size, config.hidden_size)
        if config.attention_bias:
            shapes[f"self_attn.{head}_proj.bias"] = (size,)
    return shapes


def _feed_forward(config: ModelConfig, layer: int) -> Shapes:
    hidden, inner = config.hidden_size, config.intermediate_size
    if mixture := mixture_of(config, layer):
        return {
            ROUTER_NAME: (mixture.num_experts, hidden),
            EXPERT_GATE_UP_NAME: (mixture.num_experts, 2 * mixture.intermediate_size, hidden),
            EXPERT_DOWN_NAME: (mixture.num_experts, hidden, mixture.intermediate_size),
        } | _shared_expert(hidden, mixture.shared_size)
    return _gated("mlp", hidden, inner, has_bias=config.mlp_bias)


def _shared_expert(hidden: int, inner: int | None) -> Shapes:
    if inner is None:
        return {}
    return _gated(SHARED_NAME, hidden, inner, has_bias=False) | {SHARED_GATE_NAME: (1, hidden)}


def _gated(prefix: str, hidden: int, inner: int, *, has_bias: bool) -> Shapes:
    shapes: Shapes = {}
    for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
        shapes[f"{prefix}.{name}_proj.weight"] = shape
        if has_bias:
            shapes[f"{prefix}.{name}_proj.bias"] = shape[:1]
    return shapes


def expert_parameters(config: ModelConfig, mixture: MixtureConfig) -> int:
    """Elements of one routed expert in a layer: gate, up and down."""
    return 3 * config.hidden_size * mixture.intermediate_size


def _count(shapes: Shapes) -> int:
    return sum(prod(shape) for shape in shapes.values())
