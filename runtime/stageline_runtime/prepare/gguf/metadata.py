"""Reads a GGUF file's metadata and derives `config.json` and `generation_config.json` from it.

Whatever can't be carried over exactly is refused with the metadata key and its value. Metadata floats are float32;
they are written as the shortest decimal that reads back as the same float32, so 1e-05 stays 1e-05.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader

from stageline_runtime.prepare.errors import BadConfigError

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""GGUF `general.architecture` (which is the Hugging Face `model_type` too) to the model class."""
TURN_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>")
"""Tokens that end a turn whether or not the file's metadata says so."""


@dataclass(frozen=True, slots=True)
class GgufModel:
    """An open GGUF file. Tensor data stays on disk (memory mapped) until it is converted."""

    path: Path
    reader: GGUFReader
    architecture: str

    def get(self, key: str) -> Any:
        field = self.reader.get_field(key)
        return None if field is None else field.contents()

    def required(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """The value of a metadata key that must be there; raises BadConfigError where it is missing or mistyped."""
        value = self.get(key)
        if not isinstance(value, kind):
            raise BadConfigError(f"{self.path.name}: metadata key {key} must be set, but is {value!r}")
        return value

    def hyper(self, name: str) -> Any:
        """The value of `<architecture>.<name>`, or None."""
        return self.get(f"{self.architecture}.{name}")

    def required_hyper(self, name: str) -> int:
        return int(self.required(f"{self.architecture}.{name}", int))

    @property
    def num_heads(self) -> int:
        return self.required_hyper("attention.head_count")

    @property
    def num_kv_heads(self) -> int:
        return int(self.hyper("attention.head_count_kv") or self.num_heads)

    @property
    def tensor_names(self) -> frozenset[str]:
        return frozenset(tensor.name for tensor in self.reader.tensors)


def open_gguf(path: Path) -> GgufModel:
    """Open a GGUF file of a supported architecture.

    Raises:
        BadConfigError: it isn't a whole, single-file GGUF in this machine's byte order, or of another architecture.
    """
    try:
        reader = GGUFReader(path)
    except (ValueError, KeyError, IndexError, OverflowError, UnicodeDecodeError) as error:
        raise BadConfigError(f"{path.name} is not a readable GGUF file (damaged or incomplete): {error}") from error
    model = GgufModel(path, reader, "")
    architecture = model.required("general.architecture", str)
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise BadConfigError(f"{path.name}: general.architecture {architecture!r} is not supported; supported: {known}")
    if reader.byte_order != "I":
        raise BadConfigError(f"{path.name} was written for a machine of the other byte order")
    if int(model.get("split.count") or 1) > 1:
        raise BadConfigError(
            f"{path.name} is one part of a split GGUF (split.count {model.get('split.count')}); merge it"
        )
    return GgufModel(path, reader, architecture)


def hugging_face_config(model: GgufModel) -> dict[str, Any]:
    """The content of `config.json`; weights are bfloat16.

    Raises:
        BadConfigError: a hyper-parameter is missing or has a value that isn't built.
    """
    _refuse_rope_variants(model)
    hidden_size = model.required_hyper("embedding_length")
    head_dim = _head_dim(model, hidden_size)
    rope_theta = _shortest(model.hyper("rope.freq_base") or 10_000.0)
    config = {
        "architectures": [ARCHITECTURES[model.architecture]],
        "model_type": model.architecture,
        "hidden_size": hidden_size,
        "intermediate_size": model.required_hyper("feed_forward_length"),
        "num_hidden_layers": model.required_hyper("block_count"),
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": head_dim,
        "vocab_size": _vocab_size(model),
        "max_position_embeddings": model.required_hyper("context_length"),
        "rms_norm_eps": _shortest(model.required(f"{model.architecture}.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in model.tensor_names,
        "dtype": "bfloat16",
    }
    return {**config, **_token_ids(model)}


def hugging_face_generation_config(model: GgufModel) -> dict[str, Any]:
    """The content of `generation_config.json`: which tokens start and end a text."""
    return _token_ids(model)


def _token_ids(model: GgufModel) -> dict[str, Any]:
    ids: dict[str, Any] = {"eos_token_id": list(end_token_ids(model))}
    for name, key in (("bos_token_id", "bos"), ("pad_token_id", "padding")):
        value = model.get(f"tokenizer.ggml.{key}_token_id")
        if value is not None:
            ids[name] = int(value)
    return ids


def end_token_ids(model: GgufModel) -> tuple[int, ...]:
    """Ids that end generation: the declared end-of-sequence, then end-of-turn and end-of-message."""
    declared = [model.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    tokens = model.required("tokenizer.ggml.tokens", list)
    known = [tokens.index(token) for token in TURN_END_TOKENS if token in tokens]
    return tuple(dict.fromkeys(int(value) for value in [*declared, *known] if value is not None))


def _head_dim(model: GgufModel, hidden_size: int) -> int:
    head_dim = int(model.hyper("attention.key_length") or hidden_size // model.num_heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        value = model.hyper(name)
        if value is not None and int(value) != head_dim:
            raise BadConfigError(
                f"{model.path.name}: {model.architecture}.{name} {value} differs from the head size {head_dim}, "
                "which is not supported"
            )
    return head_dim


def _refuse_rope_variants(model: GgufModel) -> None:
    scaling = model.hyper("rope.scaling.type")
    if scaling not in (None, "none"):
        raise BadConfigError(f"{model.path.name}: {model.architecture}.rope.scaling.type {scaling!r} is not supported")
    if "rope_freqs.weight" in model.tensor_names:
        raise BadConfigError(
            f"{model.path.name}: tensor rope_freqs.weight (rope scaling as a table) is not supported; "
            "use the model's hf:// source"
        )


def _vocab_size(model: GgufModel) -> int:
    for tensor in model.reader.tensors:
        if tensor.name == "token_embd.weight":
            # GGUF lists dimensions innermost first: [hidden_size, vocab_size].
            return int(tensor.shape[1])
    raise BadConfigError(f"{model.path.name}: tensor token_embd.weight is missing")


def _shortest(value: float) -> float:
    return float(str(np.float32(value)))
