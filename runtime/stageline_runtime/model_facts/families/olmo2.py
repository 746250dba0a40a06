"""OLMo 2: norms after both blocks and none before them, queries and keys normalised over all heads together."""

from dataclasses import replace

from stageline_runtime.model_facts.families import llama
from stageline_runtime.model_facts.families.reading import read_decoder
from stageline_runtime.model_facts.hyperparameters import ModelConfig
from stageline_runtime.model_facts.layer import Cut, Layer, Norm
from stageline_runtime.model_facts.model_fields import Fields


def read(fields: Fields) -> ModelConfig:
    has_bias = bool(fields.get("attention_bias", False))
    return read_decoder(fields, attention_bias=has_bias, output_bias=has_bias, default_eps=1e-5, default_eos=50_279)


def layer(config: ModelConfig, index: int) -> Layer:
    plain = llama.layer(config, index)
    return replace(
        plain,
        # A rank with some of the heads doesn't know the root mean square of all.
        query_key_norms=(
            Norm("self_attn.q_norm", plain.query.outputs, Cut.INDIVISIBLE),
            Norm("self_attn.k_norm", plain.key.outputs, Cut.INDIVISIBLE),
        ),
        attention_norm=None,
        attended_norm=Norm("post_attention_layernorm", config.hidden_size),
        feed_forward_norm=None,
        forwarded_norm=Norm("post_feedforward_layernorm", config.hidden_size),
    )
