"""The shape of a decoder-only model, read from a Hugging Face `config.json`. Pure: no torch.

A config this runtime can't run exactly is refused with the field and its value; nothing is approximated.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


class UnsupportedModelError(Exception):
    """The model's config asks for something that isn't built; the message names the field and the value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Hyper-parameters of a Llama-like decoder. Sizes are element counts."""

    architecture: str
    """Hugging Face `model_type`: `llama` or `qwen3`."""
    hidden_size: int
    intermediate_size: int
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
    mlp_bias: bool
    qk_norm: bool
    """Qwen3 normalises each head of q and k before the rotary embedding."""
    dtype: str
    """`float32` or `bfloat16`; what `auto` means for this model."""
    eos_token_ids: tuple[int, ...]

    @property
    def group_size(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    def kv_bytes_per_token(self, num_layers: int, element_bytes: int) -> int:
        """Bytes of keys and values that one token takes in `num_layers` layers."""
        return 2 * num_layers * self.num_kv_heads * self.head_dim * element_bytes


SUPPORTED_ARCHITECTURES = ("llama", "qwen3")


def read_model_config(model_dir: Path) -> ModelConfig:
    """Read `config.json` (and `generation_config.json` for end-of-sequence ids).

    Raises:
        UnsupportedModelError: a field is missing or has a value this runtime can't run.
    """
    config = _read_json(model_dir / "config.json")
    generation_path = model_dir / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.exists() else {}
    return model_config_from_dict(config, generation)


def model_config_from_dict(config: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """Build a `ModelConfig` from parsed JSON, refusing what can't be run exactly."""
    architecture = _required(config, "model_type", str)
    if architecture not in SUPPORTED_ARCHITECTURES:
        known = ", ".join(SUPPORTED_ARCHITECTURES)
        raise UnsupportedModelError(f"model_type {architecture!r} is not supported; supported: {known}")
    num_heads = _required(config, "num_attention_heads", int)
    hidden_size = _required(config, "hidden_size", int)
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModelError(f"hidden_act {activation!r} is not supported; supported: silu")
    if config.get("use_sliding_window"):
        raise UnsupportedModelError("use_sliding_window true is not supported")
    num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
    if num_kv_heads <= 0 or num_heads % num_kv_heads:
        raise UnsupportedModelError(f"num_key_value_heads {num_kv_heads} does not divide {num_heads} heads")
    rope_theta, rope_scaling = _rope(config)
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=_required(config, "intermediate_size", int),
        num_layers=_required(config, "num_hidden_layers", int),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=int(config.get("head_dim") or hidden_size // num_heads),
        vocab_size=_required(config, "vocab_size", int),
        context_length=_required(config, "max_position_embeddings", int),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=architecture == "qwen3",
        dtype=_dtype(config),
        eos_token_ids=_eos(config, generation),
    )


def _rope(config: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Rotary base and scaling; transformers 5 moved both into `rope_parameters`."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling")
    theta = float(config.get("rope_theta") or (parameters or {}).get("rope_theta") or 10_000.0)
    kind = (parameters or {}).get("rope_type") or (parameters or {}).get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UnsupportedModelError(f"rope_type {kind!r} is not supported; supported: default, llama3")
    return theta, dict(parameters or {})


def _dtype(config: dict[str, Any]) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    # CPUs and the pipeline's wire carry bfloat16; float16 weights are widened rather than rounded.
    return {"float16": "float32", "float32": "float32", "bfloat16": "bfloat16"}.get(name, "float32")


def _eos(config: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    value = generation.get("eos_token_id", config.get("eos_token_id"))
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)


def _required(config: dict[str, Any], field: str, kind: type[T]) -> T:
    value = config.get(field)
    if not isinstance(value, kind):
        raise UnsupportedModelError(f"config.json: {field} must be {kind.__name__}, not {value!r}")
    return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(f"{path.name} can't be read: {error}") from error
    if not isinstance(parsed, dict):
        raise UnsupportedModelError(f"{path.name} must hold a JSON object")
    return parsed
