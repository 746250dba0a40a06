"""Mixtral: a Mistral whose feed-forward blocks are mixtures of experts."""

from dataclasses import replace

from stageline_runtime.model_facts.families import llama
from stageline_runtime.model_facts.families.reading import read_decoder, read_mixture, read_window
from stageline_runtime.model_facts.hyperparameters import ModelConfig
from stageline_runtime.model_facts.layer import ExpertNames, Layer, Mixture
from stageline_runtime.model_facts.model_fields import Fields, positive

_SEPARATE = ExpertNames(
    router="block_sparse_moe.gate.weight",
    gate="block_sparse_moe.experts.{}.w1.weight",
    up="block_sparse_moe.experts.{}.w3.weight",
    down="block_sparse_moe.experts.{}.w2.weight",
)


def read(fields: Fields) -> ModelConfig:
    num_layers = positive(fields, "num_hidden_layers")
    sparse = (True,) * num_layers
    return read_decoder(
        fields,
        windows=(read_window(fields, None),) * num_layers,
        mixture=read_mixture(fields, "intermediate_size", normalise_weights=True, sparse_layers=sparse),
        default_kv_heads=8,
        default_eps=1e-5,
        default_rope_theta=1e6,
        default_eos=2,
    )


def layer(config: ModelConfig, index: int) -> Layer:
    assert config.mixture is not None, "every Mixtral has experts"
    experts = Mixture(sizes=config.mixture, hidden_size=config.hidden_size, separate=_SEPARATE)
    return replace(llama.layer(config, index), feed_forward=experts)
