"""Reads a Hugging Face `config.json` into the hyper-parameters of a decoder-only model. Pure: no torch.

A config this runtime can't run exactly is refused with the field and its value; nothing is approximated. Families of
the registry run in the own decoder; any other goes the coverage path, through Hugging Face's own layers.
"""

from dataclasses import replace
from pathlib import Path

from stageline_runtime.model_facts.families.reading import read_head_dim, read_kv_heads
from stageline_runtime.model_facts.families.registry import FAMILIES
from stageline_runtime.model_facts.hyperparameters import MixtureConfig, ModelConfig
from stageline_runtime.model_facts.model_coverage import (
    MeasuredParameters,
    measure_checkpoint,
    refuse_uncoverable,
    with_class_defaults,
)
from stageline_runtime.model_facts.model_fields import (
    Fields,
    UnsupportedModelError,
    dtype,
    end_of_sequence,
    positive,
    read_json,
    refuse_unbuilt,
    required,
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
    ends = {"eos_token_id": generation["eos_token_id"]} if "eos_token_id" in generation else {}
    return family.read(config | ends)


def _measured(fields: Fields, model_dir: Path) -> MeasuredParameters | None:
    if any(model_dir.glob(_PICKLED)) and not any(model_dir.glob("*.safetensors*")):
        raise UnsupportedModelError(
            f"{model_dir.name} holds {_PICKLED} and no safetensors: pickled weights are never read; convert them "
            "(transformers: from_pretrained, then save_pretrained)"
        )
    if fields.get("model_type") in FAMILIES:
        return None
    return measure_checkpoint(model_dir, with_class_defaults(fields))


def _covered(config: Fields, generation: Fields, measured: MeasuredParameters | None) -> ModelConfig:
    num_heads, hidden_size = positive(config, "num_attention_heads"), positive(config, "hidden_size")
    return ModelConfig(
        architecture=config["model_type"],
        hidden_size=hidden_size,
        intermediate_size=positive(config, "intermediate_size"),
        num_layers=positive(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=read_kv_heads(config, num_heads),
        head_dim=read_head_dim(config, hidden_size // num_heads),
        vocab_size=positive(config, "vocab_size"),
        context_length=positive(config, "max_position_embeddings"),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        dtype=dtype(config),
        eos_token_ids=end_of_sequence(config, generation),
        is_covered=True,
        measured=measured,
    )
