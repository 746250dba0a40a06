"""Llama: norms before both blocks, grouped queries, a gated feed-forward block. Most families vary these layers."""

from stageline_runtime.model_facts.families.reading import read_decoder
from stageline_runtime.model_facts.hyperparameters import ModelConfig
from stageline_runtime.model_facts.layer import Cut, Gated, Layer, Linear, Norm
from stageline_runtime.model_facts.model_fields import Fields


def read(fields: Fields) -> ModelConfig:
    has_bias = bool(fields.get("attention_bias", False))
    return read_decoder(
        fields,
        attention_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=bool(fields.get("mlp_bias", False)),
        default_eos=2,
    )


def layer(config: ModelConfig, _index: int) -> Layer:
    """Ranks have whole heads: queries with the keys and values that these attend to."""
    hidden, has_bias = config.hidden_size, config.attention_bias
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return Layer(
        attention_norm=Norm("input_layernorm", hidden),
        query=Linear("self_attn.q_proj", queries, hidden, has_bias, Cut.BY_OUTPUTS),
        key=Linear("self_attn.k_proj", keys, hidden, has_bias, Cut.BY_OUTPUTS),
        value=Linear("self_attn.v_proj", keys, hidden, has_bias, Cut.BY_OUTPUTS),
        output=Linear("self_attn.o_proj", hidden, queries, config.attention_output_bias, Cut.BY_INPUTS),
        feed_forward_norm=Norm("post_attention_layernorm", hidden),
        feed_forward=gated("mlp", hidden, config.intermediate_size, has_bias=config.mlp_bias),
    )


def gated(prefix: str, hidden: int, inner: int, *, has_bias: bool) -> Gated:
    """A dense feed-forward block, of which ranks have columns."""
    return Gated(
        gate=Linear(f"{prefix}.gate_proj", inner, hidden, has_bias, Cut.BY_OUTPUTS),
        up=Linear(f"{prefix}.up_proj", inner, hidden, has_bias, Cut.BY_OUTPUTS),
        down=Linear(f"{prefix}.down_proj", hidden, inner, has_bias, Cut.BY_INPUTS),
    )
