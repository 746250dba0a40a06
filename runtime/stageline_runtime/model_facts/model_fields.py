"""Reads typed fields of a Hugging Face `config.json`. Pure but for `read_json`; no torch.

A value that this runtime can't run exactly raises `UnsupportedModelError`, which names the field and the value.
"""

import json
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
Fields = dict[str, Any]

_MODALITIES = ("vision_config", "audio_config", "speech_config", "image_config", "video_config", "text_config")

_LLAMA3_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


class UnsupportedModelError(Exception):
    """The model's config asks for something that isn't built; the message names the field and the value."""


def read_json(path: Path) -> Fields:
    """The JSON object in `path`; raises UnsupportedModelError where it can't be read or holds something else."""
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(f"{path.name} can't be read: {error}") from error
    if not isinstance(parsed, dict):
        raise UnsupportedModelError(f"{path.name} must hold a JSON object")
    return parsed


def required(fields: Fields, name: str, kind: type[T]) -> T:
    """The value of a field that must be there."""
    value = fields.get(name)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise UnsupportedModelError(f"config.json: {name} must be {kind.__name__}, not {value!r}")
    return value


def positive(fields: Fields, name: str) -> int:
    """A count or size that must be there and above zero."""
    value = required(fields, name, int)
    if value <= 0:
        raise UnsupportedModelError(f"config.json: {name} is {value}; it must be at least 1")
    return value


def positive_or_none(fields: Fields, name: str) -> int | None:
    """A count or size above zero; None where the field is null or not there."""
    return None if fields.get(name) is None else positive(fields, name)


def number(fields: Fields, name: str, default: float) -> float:
    """A finite number above zero, `default` where the field is null or not there."""
    value = default if fields.get(name) is None else fields[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise UnsupportedModelError(f"config.json: {name} must be a number above 0, not {value!r}")
    return float(value)


def names(fields: Fields, name: str) -> list[str] | None:
    """A list of strings; None where the field is null or not there."""
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise UnsupportedModelError(f"config.json: {name} must be a list of names, not {value!r}")
    return value


def whole_numbers(fields: Fields, name: str) -> list[int]:
    """A list of whole numbers, empty where the field is null or not there; a lone number is a list of one."""
    value = fields.get(name)
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in values):
        raise UnsupportedModelError(f"config.json: {name} must hold whole numbers, not {value!r}")
    return values


def rope_parameters(fields: Fields) -> Fields:
    """What scales the rotary embedding, empty for nothing; transformers 5 keeps the base here, too."""
    value = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(value, dict):
        raise UnsupportedModelError(f"config.json: rope_parameters must be an object, not {value!r}")
    return value


def refuse_unbuilt(fields: Fields) -> None:
    """Refuse what no model of this runtime has: other modalities than text, encoders, quantised weights."""
    for name in _MODALITIES:
        if fields.get(name) is not None:
            raise UnsupportedModelError(
                f"config.json has {name}: models with other inputs than text are not supported yet; "
                "use the text-only form of the model"
            )
    if fields.get("is_encoder_decoder"):
        raise UnsupportedModelError("is_encoder_decoder true is not supported: only decoder-only models are")
    if quantization := fields.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise UnsupportedModelError(f"quantization_config {method!r} is not supported: use unquantised weights")


def rope(fields: Fields, default_theta: float) -> tuple[float, Fields | None]:
    parameters = rope_parameters(fields)
    theta = number(fields, "rope_theta", number(parameters, "rope_theta", default_theta))
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    share = parameters.get("partial_rotary_factor", fields.get("partial_rotary_factor"))
    if share not in (None, 1, 1.0):
        raise UnsupportedModelError(f"partial_rotary_factor {share!r} is not supported; supported: 1")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UnsupportedModelError(f"rope_type {kind!r} is not supported; supported: default, llama3")
    for name in _LLAMA3_NUMBERS:
        number(parameters, name, 0.0)  # zero is refused: all of them have to be there
    return theta, dict(parameters)


def dtype(fields: Fields) -> str:
    """What `auto` means for this model: `float32` or `bfloat16`."""
    name = str(fields.get("dtype") or fields.get("torch_dtype") or "float32")
    # CPUs and the pipeline's wire carry bfloat16; float16 weights are widened rather than rounded.
    return {"float16": "float32", "float32": "float32", "bfloat16": "bfloat16"}.get(name, "float32")


def end_of_sequence(fields: Fields, generation: Fields) -> tuple[int, ...]:
    """Ids that end an answer, as `generation_config.json` or else the config has them."""
    holder = generation if "eos_token_id" in generation else fields
    return tuple(whole_numbers(holder, "eos_token_id"))
