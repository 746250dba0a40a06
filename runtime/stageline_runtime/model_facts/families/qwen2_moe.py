"""Qwen2-MoE: a Qwen2 with mixtures of experts in some layers, each with a shared expert and its gate."""

from dataclasses import replace

from stageline_runtime.model_facts.families import llama, qwen2, qwen3_moe
from stageline_runtime.model_facts.families.reading import read_decoder
from stageline_runtime.model_facts.hyperparameters import ModelConfig
from stageline_runtime.model_facts.layer import Layer, Linear, Mixture
from stageline_runtime.model_facts.model_fields import Fields, UnsupportedModelError, positive

_SHARED = "mlp.shared_expert"


def read(fields: Fields) -> ModelConfig:
    if fields.get("qkv_bias", True) is not True:
        raise UnsupportedModelError("qkv_bias false is not supported: query, key and value have biases in this family")
    shared = positive({"shared_expert_intermediate_size": 5632} | fields, "shared_expert_intermediate_size")
    return read_decoder(
        fields,
        attention_bias=True,
        windows=qwen2.read_windows(fields, _alternating_below),
        mixture=replace(qwen3_moe.read_sizes(fields), shared_size=shared),
        default_kv_heads=16,
    )


def _alternating_below(index: int, end: int) -> bool:
    """Every other layer, the first one too."""
    return index % 2 == 0 and index < end


def layer(config: ModelConfig, index: int) -> Layer:
    whole = qwen3_moe.with_experts(llama.layer(config, index), config, index)
    mixture = whole.feed_forward
    if not isinstance(mixture, Mixture) or mixture.sizes.shared_size is None:
        return whole
    # Whole on every rank: ranks never share a mixture's other parts.
    gate = Linear(f"{_SHARED}_gate", 1, config.hidden_size)
    shared = llama.gated(_SHARED, config.hidden_size, mixture.sizes.shared_size, has_bias=False)
    return replace(whole, feed_forward=replace(mixture, shared=shared, shared_gate=gate))
