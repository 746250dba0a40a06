"""Model configs for planning tests: no weights, only the numbers that a cut and a prediction depend on."""

from stageline_api.runtime_config import LayerRange
from stageline_runtime.model_facts.model_config import ModelConfig, model_config_from_dict
from stageline_runtime.model_facts.model_shapes import end_parameters, layer_size
from stageline_runtime.model_facts.rank_cut import part_of_layers
from stageline_runtime.planning.cut import CutCosts


def small_llama(num_layers: int, **changes: object) -> ModelConfig:
    """A Llama small enough that its bytes can be checked by hand."""
    fields = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "max_position_embeddings": 256,
    }
    return model_config_from_dict(fields | changes, {})


def llama_70b_class() -> ModelConfig:
    """The shape of the public 70B-class Llama models."""
    return small_llama(
        80,
        hidden_size=8192,
        intermediate_size=28_672,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128_256,
        max_position_embeddings=131_072,
        dtype="bfloat16",
    )


def small_mixture(num_layers: int) -> ModelConfig:
    """A mixture of 128 experts of which 8 run, with a vocabulary as large as such models have."""
    return small_llama(
        num_layers,
        model_type="qwen3_moe",
        hidden_size=2048,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        vocab_size=151_936,
        dtype="bfloat16",
        max_position_embeddings=4096,
    )


def stage_cost(layers: LayerRange, num_layers: int, costs: CutCosts) -> float:
    """Cost of the stage that holds `layers` of a model with `num_layers`."""
    ends = (layers.first == 0) * costs.embedding + (layers.last == num_layers - 1) * costs.head
    return layers.count * costs.layer + ends


def weight_bytes(
    config: ModelConfig,
    layers: LayerRange,
    *,
    is_first: bool,
    is_last: bool,
    element_bytes: int,
    ranks: int = 1,
    experts: int = 1,
) -> int:
    """Bytes of the weights of a stage, of one of its `ranks`, or of one of those that its `experts` are cut over, from
    the config alone."""
    part = part_of_layers(config, ranks)
    held = sum(layer_size(part, layer).held(experts) for layer in range(layers.first, layers.last + 1))
    return element_bytes * (held + end_parameters(config, ranks, is_first=is_first, is_last=is_last))
