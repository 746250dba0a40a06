"""Qwen3-MoE: a Qwen3 with mixtures of experts in some layers, and one switch for the windows of all layers."""

from dataclasses import replace

from stageline_runtime.model_facts.families import qwen3
from stageline_runtime.model_facts.families.reading import read_decoder, read_mixture, read_window
from stageline_runtime.model_facts.hyperparameters import MixtureConfig, ModelConfig
from stageline_runtime.model_facts.layer import ExpertNames, Layer, Mixture
from stageline_runtime.model_facts.model_fields import Fields, positive, whole_numbers

_SEPARATE = ExpertNames(
    router=Mixture.router,
    gate="mlp.experts.{}.gate_proj.weight",
    up="mlp.experts.{}.up_proj.weight",
    down="mlp.experts.{}.down_proj.weight",
)


def read(fields: Fields) -> ModelConfig:
    window = read_window(fields, 4096) if fields.get("use_sliding_window") else None
    has_bias = bool(fields.get("attention_bias", False))
    return read_decoder(
        fields,
        attention_bias=has_bias,
        output_bias=has_bias,
        windows=(window,) * positive(fields, "num_hidden_layers"),
        mixture=read_sizes(fields),
        default_kv_heads=4,
    )


def read_sizes(fields: Fields) -> MixtureConfig:
    dense = set(whole_numbers(fields, "mlp_only_layers"))
    step = positive({"decoder_sparse_step": 1} | fields, "decoder_sparse_step")
    layers = range(positive(fields, "num_hidden_layers"))
    return read_mixture(
        fields,
        "moe_intermediate_size",
        normalise_weights=bool(fields.get("norm_topk_prob", False)),
        sparse_layers=tuple(index not in dense and (index + 1) % step == 0 for index in layers),
    )


def layer(config: ModelConfig, index: int) -> Layer:
    return with_experts(qwen3.layer(config, index), config, index)


def with_experts(dense: Layer, config: ModelConfig, index: int) -> Layer:
    """The layer with a mixture in place of its dense block, where the config has one."""
    if config.mixture is None or not config.mixture.sparse_layers[index]:
        return dense
    return replace(
        dense, feed_forward=Mixture(sizes=config.mixture, hidden_size=config.hidden_size, separate=_SEPARATE)
    )
