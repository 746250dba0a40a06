"""Reads typed fields of a Hugging Face `config.json`. Pure but for `read_json`; no torch.

A value that this runtime can't run exactly raises `UnsupportedModelError`, which names the field and the value.
"""

import json
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
Fields = dict[str, Any]

_MODALITIES = ("vision_config", "audio_config", "speech_config", "image_config", "video_config", "text_config")

_ORIGINAL = "original_max_position_embeddings"
_ROPE_NUMBERS = {
    "dynamic": ("factor",),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "longrope": ("factor", _ORIGINAL),
    "yarn": ("factor", _ORIGINAL),
}
"""Numbers above zero that each way of scaling needs."""
ROPE_TYPES = tuple(_ROPE_NUMBERS)
"""Of the own decoder, besides `default`."""
_LONGROPE_LISTS = ("short_factor", "long_factor")
_YARN_OPTIONS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


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
    """What scales the rotary embedding, empty for nothing; transformers 5 keeps the base here, too.

    Of the two names the older wins, as in transformers, whose configs hold both once a person adds a scaling.
    """
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    value = fields.get(name) or {}
    if not isinstance(value, dict):
        raise UnsupportedModelError(f"config.json: {name} must be an object, not {value!r}")
    return value


def refuse_unbuilt(fields: Fields) -> None:
    """Refuse what no model of this runtime has: other modalities than text, encoders, weights by another name."""
    if fields.get("transformers_weights") not in (None, "model.safetensors"):
        name = fields["transformers_weights"]
        raise UnsupportedModelError(f"transformers_weights {name!r} is not supported; supported: model.safetensors")
    for name in _MODALITIES:
        if fields.get(name) is not None:
            raise UnsupportedModelError(
                f"config.json has {name}: models with other inputs than text are not supported yet; "
                "use the text-only form of the model"
            )
    if fields.get("is_encoder_decoder"):
        raise UnsupportedModelError("is_encoder_decoder true is not supported: only decoder-only models are")


def rope(fields: Fields, default_theta: float) -> tuple[float, Fields | None]:
    """The base of the rotary embedding, and how its frequencies are scaled; None: not at all.

    Of what is scaled, `rope_type` is the way, `longest` is `max_position_embeddings`, and all numbers are there that it
    needs.
    """
    parameters = rope_parameters(fields)
    if any(isinstance(value, dict) for value in parameters.values()):
        raise UnsupportedModelError(
            f"config.json: rotary parameters by kind of layer ({', '.join(parameters)}) are not supported"
        )
    theta = number(parameters, "rope_theta", number(fields, "rope_theta", default_theta))
    _refuse_lost_theta(fields, parameters, theta)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    share = parameters.get("partial_rotary_factor", fields.get("partial_rotary_factor"))
    if share not in (None, 1, 1.0):
        raise UnsupportedModelError(f"partial_rotary_factor {share!r} is not supported; supported: 1")
    if kind == "default":
        return theta, None
    if kind not in ROPE_TYPES:
        raise UnsupportedModelError(f"rope_type {kind!r} is not supported; supported: default, {', '.join(ROPE_TYPES)}")
    trained = positive(fields, "max_position_embeddings")
    scaling = {_ORIGINAL: trained} | parameters | {"rope_type": kind, "longest": trained}
    # Beside the dictionary, as Phi-3's configs have it, it goes before the one in there.
    scaling |= {} if fields.get(_ORIGINAL) is None else {_ORIGINAL: fields[_ORIGINAL]}
    if kind == "longrope":
        original = number(scaling, _ORIGINAL, 0.0)
        scaling["factor"] = parameters.get("factor") or trained / original
        for name in _LONGROPE_LISTS:
            _numbers(scaling, name)
    for name in _ROPE_NUMBERS[kind]:
        number(scaling, name, 0.0)  # zero is refused: all of them have to be there
    for name in _YARN_OPTIONS:
        if scaling.get(name) is not None:
            number(scaling, name, 0.0)
    return theta, scaling


def _refuse_lost_theta(fields: Fields, parameters: Fields, theta: float) -> None:
    """Refuse a config whose base nobody reads, since it stands in `rope_parameters` beside a `rope_scaling`."""
    newer = fields.get("rope_parameters")
    lost = newer.get("rope_theta") if isinstance(newer, dict) and newer is not parameters else None
    is_said = parameters.get("rope_theta") is not None or fields.get("rope_theta") is not None
    if lost not in (None, theta) and not is_said:
        raise UnsupportedModelError(
            f"config.json: rope_scaling replaces rope_parameters, so rope_theta would be {theta:g} and not {lost!r}; "
            "put rope_theta into rope_scaling"
        )


def _numbers(fields: Fields, name: str) -> None:
    values = fields.get(name)
    if not isinstance(values, list) or not values:
        raise UnsupportedModelError(f"config.json: {name} must be a list of numbers, not {values!r}")
    for value in values:
        number({name: value}, name, 0.0)


def dtype(fields: Fields) -> str:
    """The number format of the checkpoint, as far as stages compute in it; else `float32`, which holds all others."""
    stored = stored_dtype(fields)
    return stored if stored in ("bfloat16", "float16") else "float32"


def stored_dtype(fields: Fields) -> str:
    """What the config says that its weights are stored in, without torch's prefix; empty where it doesn't say."""
    return str(fields.get("dtype") or fields.get("torch_dtype") or "").removeprefix("torch.")


def end_of_sequence(fields: Fields, generation: Fields) -> tuple[int, ...]:
    """Ids that end an answer, as `generation_config.json` or else the config has them."""
    holder = generation if "eos_token_id" in generation else fields
    return tuple(whole_numbers(holder, "eos_token_id"))
