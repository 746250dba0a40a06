"""The shape of a decoder-only model, read from a Hugging Face `config.json`. Pure: no torch.

A config this runtime can't run exactly is refused with the field and its value; nothing is approximated. Families with
a row in `model_families` run in the own decoder; any other goes the coverage path, through Hugging Face's own layers.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stageline_runtime.model_facts.model_coverage import (
    MeasuredParameters,
    measure_checkpoint,
    refuse_uncoverable,
    with_class_defaults,
)
from stageline_runtime.model_facts.model_families import FAMILIES, Family, MixtureConfig
from stageline_runtime.model_facts.model_fields import (
    Fields,
    UnsupportedModelError,
    dtype,
    end_of_sequence,
    number,
    positive,
    positive_or_none,
    read_json,
    refuse_unbuilt,
    required,
    rope,
)
from stageline_runtime.model_facts.quantization import quantization_of
from stageline_runtime.model_facts.tokenizer_files import with_end_token

__all__ = [
    "SUPPORTED_ARCHITECTURES",
    "MixtureConfig",
    "ModelConfig",
    "UnsupportedModelError",
    "model_config_from_dict",
    "read_model_config",
    "require_sizes",
    "sized_model_config",
]

SUPPORTED_ARCHITECTURES = tuple(FAMILIES)
"""Families of the own decoder."""
_PICKLED = "pytorch_model*.bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Hyper-parameters of a decoder. Sizes are element counts."""

    architecture: str
    """Hugging Face `model_type`."""
    hidden_size: int
    intermediate_size: int
    """Of the dense feed-forward blocks."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    tie_word_embeddings: bool
    attention_bias: bool
    """Whether the query, key and value projections have biases."""
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """Qwen3 normalises each head of q and k before the rotary embedding."""
    attention_windows: tuple[int | None, ...]
    """By layer: how many positions a query sees, itself included; None: all before it."""
    mixture: MixtureConfig | None
    """Set where feed-forward blocks are mixtures of experts."""
    dtype: str
    """What `auto` means for this model: `float32` or `bfloat16`, and `float16` where another engine computes."""
    eos_token_ids: tuple[int, ...]
    is_covered: bool = False
    """Whether Hugging Face's layers run it. They read the config themselves: what shapes a layer's inside (biases,
    norms, rotary embedding, windows, mixtures) is left at its plainest here and means nothing."""
    measured: MeasuredParameters | None = None
    """Of a covered model whose checkpoint is here: its weights, as the file headers have them."""

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_kv_heads

    def kv_bytes_per_token(self, num_layers: int, element_bytes: int) -> int:
        """Bytes of keys and values that one token takes in `num_layers` layers."""
        return 2 * num_layers * self.num_kv_heads * self.head_dim * element_bytes


def read_model_config(model_dir: Path) -> ModelConfig:
    """Read `config.json` (and `generation_config.json` and the tokenizer's files for end-of-sequence ids).

    Raises:
        UnsupportedModelError: a field is missing or has a value this runtime can't run.
    """
    fields = read_json(model_dir / "config.json")
    generation_path = model_dir / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    config = model_config_from_dict(fields, generation, _measured(fields, model_dir))
    return replace(config, eos_token_ids=with_end_token(config.eos_token_ids, model_dir, config.vocab_size))


def sized_model_config(fields: Fields, model_dir: Path) -> ModelConfig:
    """The config for planning: the sizes of all weights are known, if need be from the checkpoint in `model_dir`.

    Raises:
        UnsupportedModelError: a field is missing or can't be run, or the checkpoint that would tell is not there.
    """
    return require_sizes(model_config_from_dict(fields, {}, _measured(fields, model_dir)))


def require_sizes(config: ModelConfig) -> ModelConfig:
    """The same config, once it is sure that the sizes of its weights are known.

    Raises:
        UnsupportedModelError: it is a covered model whose checkpoint is not here.
    """
    if config.is_covered and config.measured is None:
        raise UnsupportedModelError(
            f"model_type {config.architecture!r}: config.json alone doesn't tell the size of its layers; "
            "its safetensors files have to be beside it"
        )
    return config


def model_config_from_dict(
    config: Fields, generation: Fields, measured: MeasuredParameters | None = None
) -> ModelConfig:
    """Build a `ModelConfig` from parsed JSON, refusing what can't be run exactly."""
    architecture = required(config, "model_type", str)
    refuse_unbuilt(config)
    quantization_of(config)  # refuses what isn't read
    family = FAMILIES.get(architecture)
    if family is None:
        whole = with_class_defaults(config)
        refuse_uncoverable(whole, SUPPORTED_ARCHITECTURES, written=config)
        return _covered(whole, generation, measured)
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModelError(f"hidden_act {activation!r} is not supported; supported: silu")
    return _own(config, generation, family)


def _measured(fields: Fields, model_dir: Path) -> MeasuredParameters | None:
    if any(model_dir.glob(_PICKLED)) and not any(model_dir.glob("*.safetensors*")):
        raise UnsupportedModelError(
            f"{model_dir.name} holds {_PICKLED} and no safetensors: pickled weights are never read; convert them "
            "(transformers: from_pretrained, then save_pretrained)"
        )
    if fields.get("model_type") in FAMILIES:
        return None
    return measure_checkpoint(model_dir, with_class_defaults(fields))


def _own(config: Fields, generation: Fields, family: Family) -> ModelConfig:
    num_layers, num_heads = positive(config, "num_hidden_layers"), positive(config, "num_attention_heads")
    hidden_size = positive(config, "hidden_size")
    rope_theta, rope_scaling = rope(config, family.default_rope_theta)
    head_dim = _head_dim(config, hidden_size // num_heads, family.default_head_dim)
    attention_bias = bool(config.get("attention_bias", False))
    return ModelConfig(
        architecture=config["model_type"],
        hidden_size=hidden_size,
        intermediate_size=positive(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_kv_heads(config, num_heads, family.default_num_kv_heads),
        head_dim=head_dim,
        vocab_size=positive(config, "vocab_size"),
        context_length=_context_length(config, rope_scaling, head_dim),
        rms_norm_eps=number(config, "rms_norm_eps", family.default_rms_norm_eps),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=_decided(family.query_key_value_bias, attention_bias),
        attention_output_bias=_decided(family.output_bias, attention_bias),
        mlp_bias=_decided(family.feed_forward_bias, bool(config.get("mlp_bias", False))),
        qk_norm=family.query_key_norm,
        attention_windows=family.windows(config, num_layers),
        mixture=None if family.mixture is None else family.mixture(config, num_layers),
        dtype=dtype(config),
        eos_token_ids=end_of_sequence({"eos_token_id": family.default_eos_token_id} | config, generation),
    )


def _covered(config: Fields, generation: Fields, measured: MeasuredParameters | None) -> ModelConfig:
    num_layers, num_heads = positive(config, "num_hidden_layers"), positive(config, "num_attention_heads")
    hidden_size = positive(config, "hidden_size")
    return ModelConfig(
        architecture=config["model_type"],
        hidden_size=hidden_size,
        intermediate_size=positive(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_kv_heads(config, num_heads, None),
        head_dim=_head_dim(config, hidden_size // num_heads, None),
        vocab_size=positive(config, "vocab_size"),
        context_length=positive(config, "max_position_embeddings"),
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
        rope_scaling=None,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=False,
        attention_output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        attention_windows=(None,) * num_layers,
        mixture=None,
        dtype=dtype(config),
        eos_token_ids=end_of_sequence(config, generation),
        is_covered=True,
        measured=measured,
    )


def _decided(by_family: bool | None, by_config: bool) -> bool:
    return by_config if by_family is None else by_family


def _context_length(config: Fields, rope_scaling: Fields | None, head_dim: int) -> int:
    """YaRN's configs often name the context that was trained, and by how much it is stretched."""
    trained = positive(config, "max_position_embeddings")
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


def _kv_heads(config: Fields, num_heads: int, default: int | None) -> int:
    """Null means one for each head; a field that isn't there means the family's default."""
    num_kv_heads = positive_or_none({"num_key_value_heads": default} | config, "num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise UnsupportedModelError(f"num_key_value_heads {num_kv_heads} does not divide {num_heads} heads")
    return num_kv_heads


def _head_dim(config: Fields, quotient: int, default: int | None) -> int:
    head_dim = positive_or_none(config, "head_dim") or default or quotient
    if head_dim < 1 or head_dim % 2:
        raise UnsupportedModelError(f"head_dim is {head_dim}; it must be even, and at least 2")
    return head_dim
