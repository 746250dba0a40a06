"""What an engine has to know of a model that another engine computes: sizes for the cut, vocabulary, context, ends.

That engine says itself what it can't run, so nothing is refused here but a config that doesn't tell these numbers, by
any of the names that families give them. Of a model with other inputs than text the config of its text part counts.
What shapes a layer's inside means nothing.
"""

from pathlib import Path
from typing import Final

from stageline_runtime.model_facts.hyperparameters import ModelConfig
from stageline_runtime.model_facts.model_coverage import MeasuredParameters, measure_checkpoint, with_class_defaults
from stageline_runtime.model_facts.model_fields import (
    Fields,
    UnsupportedModelError,
    end_of_sequence,
    positive,
    positive_or_none,
    read_json,
    stored_dtype,
)
from stageline_runtime.model_facts.tokenizer_files import with_end_token

_TEXT_PARTS: Final = ("text_config", "llm_config", "language_config")
_LAYERS: Final = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HIDDEN: Final = ("hidden_size", "n_embd", "d_model", "n_embed")
_HEADS: Final = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_VOCABULARY: Final = ("vocab_size", "padded_vocab_size")
_CONTEXT: Final = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length", "max_sequence_length",
)  # fmt: skip
UNSAID_CONTEXT: Final = 2048
"""Tokens, where a config names no longest context (ALiBi, state spaces): vLLM's own default."""
_DTYPES: Final = ("float32", "bfloat16", "float16")
_ELEMENTS_OF_LAYER: Final = 12
"""Times the square of the hidden size: a layer's weights, where no checkpoint tells; all layers are alike then."""


def read_foreign_model(model_dir: Path) -> ModelConfig:
    """Read `config.json`, `generation_config.json` and, where they are here, the headers of the weight files.

    Raises:
        UnsupportedModelError: one of these numbers is missing.
    """
    whole = read_json(model_dir / "config.json")
    fields = _text_part(whole)
    generation_path = model_dir / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    num_layers, hidden_size = positive(fields, _name_of(fields, _LAYERS)), positive(fields, _name_of(fields, _HIDDEN))
    vocab_size = positive(fields, _name_of(fields, _VOCABULARY))
    num_heads = positive_or_none(fields, _name_of(fields, _HEADS)) or 1
    return ModelConfig(
        architecture=str(whole.get("model_type", "")),
        hidden_size=hidden_size,
        intermediate_size=positive_or_none(fields, "intermediate_size") or hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=positive_or_none(fields, "num_key_value_heads") or num_heads,
        head_dim=positive_or_none(fields, "head_dim") or max(1, hidden_size // num_heads),
        vocab_size=vocab_size,
        context_length=positive_or_none(fields, _name_of(fields, _CONTEXT)) or UNSAID_CONTEXT,
        tie_word_embeddings=bool(fields.get("tie_word_embeddings", whole.get("tie_word_embeddings", False))),
        dtype=_dtype(whole, fields),
        eos_token_ids=with_end_token(
            end_of_sequence(with_class_defaults(fields if "eos_token_id" in fields else whole), generation),
            model_dir,
            vocab_size,
        ),
        is_covered=True,
        measured=_measured(model_dir, fields) or _estimated(num_layers, hidden_size, vocab_size),
    )


def _name_of(fields: Fields, names: tuple[str, ...]) -> str:
    """Under which of these names the config has a number; the first where it has none."""
    return next((name for name in names if fields.get(name) is not None), names[0])


def _text_part(fields: Fields) -> Fields:
    for name in _TEXT_PARTS:
        part = fields.get(name)
        if isinstance(part, dict) and not part.keys().isdisjoint(_LAYERS):
            return part
    return fields


def _dtype(whole: Fields, fields: Fields) -> str:
    """The checkpoint's own, float16 too: many kernels for quantised weights compute in nothing else."""
    named = stored_dtype(fields) or stored_dtype(whole)
    return named if named in _DTYPES else "float32"


def _measured(model_dir: Path, fields: Fields) -> MeasuredParameters | None:
    try:
        measured = measure_checkpoint(model_dir, fields)
    except UnsupportedModelError:
        return None
    # Weights that are named otherwise are no layer's there, and tell nothing about the cut.
    return measured if measured is not None and all(measured.layers) else None


def _estimated(num_layers: int, hidden_size: int, vocab_size: int) -> MeasuredParameters:
    ends = vocab_size * hidden_size
    layers = (_ELEMENTS_OF_LAYER * hidden_size**2,) * num_layers
    return MeasuredParameters(layers=layers, front=ends, tail=ends, is_tied=False)
