"""What the families' configs have in common: sizes, rotary embedding, tokens that end an answer, sizes of mixtures.

A config.json may omit what Hugging Face's config class has a default for; a family gives its own here.
"""

from stageline_runtime.model_facts.hyperparameters import MixtureConfig, ModelConfig, Windows
from stageline_runtime.model_facts.model_fields import (
    Fields,
    UnsupportedModelError,
    dtype,
    end_of_sequence,
    number,
    positive,
    positive_or_none,
    rope,
)


def read_decoder(
    fields: Fields,
    *,
    attention_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    windows: Windows | None = None,
    mixture: MixtureConfig | None = None,
    default_kv_heads: int | None = None,
    default_head_dim: int | None = None,
    default_eps: float = 1e-6,
    default_rope_theta: float = 10_000.0,
    default_eos: int | None = None,
) -> ModelConfig:
    """The hyper-parameters of a model that the own decoder runs.

    `windows` None: no layer has one. `default_kv_heads` None: as many as heads. `default_head_dim` None:
    `hidden_size / num_heads`.

    Raises:
        UnsupportedModelError: a field is missing or has a value that isn't run exactly.
    """
    activation = fields.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModelError(f"hidden_act {activation!r} is not supported; supported: silu")
    num_layers, num_heads = positive(fields, "num_hidden_layers"), positive(fields, "num_attention_heads")
    hidden_size = positive(fields, "hidden_size")
    rope_theta, rope_scaling = rope(fields, default_rope_theta)
    head_dim = read_head_dim(fields, default_head_dim or hidden_size // num_heads)
    return ModelConfig(
        architecture=fields["model_type"],
        hidden_size=hidden_size,
        intermediate_size=positive(fields, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=read_kv_heads({"num_key_value_heads": default_kv_heads} | fields, num_heads),
        head_dim=head_dim,
        vocab_size=positive(fields, "vocab_size"),
        context_length=_context_length(fields, rope_scaling, head_dim),
        rms_norm_eps=number(fields, "rms_norm_eps", default_eps),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
        attention_bias=attention_bias,
        attention_output_bias=output_bias,
        mlp_bias=mlp_bias,
        attention_windows=windows or (None,) * num_layers,
        mixture=mixture,
        dtype=dtype(fields),
        eos_token_ids=end_of_sequence({"eos_token_id": default_eos} | fields, {}),
    )


def read_kv_heads(fields: Fields, num_heads: int) -> int:
    """Key and value heads; as many as heads where the field is null or not there."""
    num_kv_heads = positive_or_none(fields, "num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise UnsupportedModelError(f"num_key_value_heads {num_kv_heads} does not divide {num_heads} heads")
    return num_kv_heads


def read_head_dim(fields: Fields, default: int) -> int:
    head_dim = positive_or_none(fields, "head_dim") or default
    if head_dim < 1 or head_dim % 2:
        raise UnsupportedModelError(f"head_dim is {head_dim}; it must be even, and at least 2")
    return head_dim


def read_window(fields: Fields, default: int | None) -> int | None:
    """`sliding_window`; null switches it off."""
    return positive_or_none({"sliding_window": default} | fields, "sliding_window")


def read_mixture(
    fields: Fields,
    size_field: str,
    *,
    normalise_weights: bool,
    sparse_layers: tuple[bool, ...],
    shared_size: int | None = None,
) -> MixtureConfig:
    """The sizes of a family's mixtures; `size_field` names an expert's inner size."""
    # transformers 5 writes num_local_experts for all families; published Qwen configs have num_experts.
    name = "num_local_experts" if "num_local_experts" in fields else "num_experts"
    num_experts, experts_per_token = positive(fields, name), positive(fields, "num_experts_per_tok")
    if experts_per_token > num_experts:
        raise UnsupportedModelError(f"num_experts_per_tok {experts_per_token} is above {name} {num_experts}")
    return MixtureConfig(
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        intermediate_size=positive(fields, size_field),
        normalise_weights=normalise_weights,
        sparse_layers=sparse_layers,
        shared_size=shared_size,
    )


def _context_length(fields: Fields, rope_scaling: Fields | None, head_dim: int) -> int:
    """YaRN's configs often name the context that was trained, and by how much it is stretched."""
    trained = positive(fields, "max_position_embeddings")
    if rope_scaling is None:
        return trained
    for name in ("short_factor", "long_factor") if rope_scaling["rope_type"] == "longrope" else ():
        count, needed = len(rope_scaling[name]), head_dim // 2
        if count != needed:
            raise UnsupportedModelError(
                f"config.json: {name} has {count} numbers; heads of size {head_dim} need {needed}"
            )
    if rope_scaling["rope_type"] != "yarn":
        return trained
    return max(trained, int(rope_scaling["factor"] * rope_scaling["original_max_position_embeddings"]))
