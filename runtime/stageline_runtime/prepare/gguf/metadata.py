"""Reads a GGUF file's metadata and derives `config.json` and `generation_config.json` from it.

Whatever can't be carried over exactly is refused with the metadata key and its value, and so is a key of the
architecture that isn't read here, unless its value changes nothing. Metadata floats are float32; they are written as
the shortest decimal that reads back as the same float32, so 1e-05 stays 1e-05.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader

from stageline_api.resource.field_problem import show_value
from stageline_runtime.prepare.errors import BadConfigError

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""GGUF `general.architecture` (which is the Hugging Face `model_type` too) to the model class."""
_DTYPES: Final = {
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F16: "float16",
    GGMLQuantizationType.BF16: "bfloat16",
}
END_TOKENS: Final = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<eos>", "<turn|>",
    "<end_of_utterance>", "<|tool_response>", "[e~[", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|fim_pad|>",
    "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>",
    "<|file_sep|>",
))  # fmt: skip
"""Tokens that end an answer in llama.cpp by their names alone, whatever the metadata says of them."""
_NO_ENDS: Final = (({"<|return|>", "<|call|>"}, "<|end|>"), ({"<|calls|>", "<|flush|>"}, "<|end|>"))
"""Where a vocabulary has the former, the latter only ends a message there."""
_READ: Final = frozenset((
    "context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.original_context_length",
))  # fmt: skip
"""What is read of an architecture, and a length that only a scaling would need."""
_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = MappingProxyType(
    {
        "rope.scaling.factor": (0.0, 1.0),
        "rope.scale_linear": (0.0, 1.0),
        "rope.scaling.attn_factor": (1.0,),
        "rope.scaling.finetuned": (True, False),
        "tensor_data_layout": ("Meta AI original pth",),
        "attention.causal": (True,),
        "attention.sliding_window": (0,),
        "attention.clamp_kqv": (0.0,),
        "attention.max_alibi_bias": (0.0,),
        "attention.scale": (0.0,),
        "logit_scale": (0.0, 1.0),
        "residual_scale": (0.0, 1.0),
        "embedding_scale": (0.0, 1.0),
        "expert_count": (0,),
        "expert_used_count": (0,),
        "use_parallel_residual": (False,),
    }
)
"""Values of other keys that change nothing."""
_UNSCALED: Final = frozenset(("rope.scaling.factor", "rope.scale_linear"))
"""What means nothing where `rope.scaling.type` is `none`. Where no type is said, llama.cpp scales by the factor."""
_SAMPLING: Final = (("temperature", "temp"), ("top_k", "top_k"), ("top_p", "top_p"), ("min_p", "min_p"))
"""Fields of `generation_config.json`, and what GGUF calls them."""


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
        """Raises BadConfigError where they differ from layer to layer, which is given as a list."""
        name = "attention.head_count_kv"
        return self.num_heads if self.hyper(name) in (None, 0) else self.required_hyper(name)

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
    """The content of `config.json`.

    Raises:
        BadConfigError: a hyper-parameter is missing, unknown, or has a value that isn't built.
    """
    _refuse_rope_variants(model)
    _refuse_unread(model)
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
        "dtype": _dtype(model),
    }
    return {**config, **_token_ids(model)}


def hugging_face_generation_config(model: GgufModel) -> dict[str, Any]:
    """The content of `generation_config.json`: which tokens start and end a text, and how answers are sampled."""
    sampling = {name: model.get(f"general.sampling.{key}") for name, key in _SAMPLING}
    said = {
        name: _shortest(value) if isinstance(value, float) else value
        for name, value in sampling.items()
        if value is not None
    }
    return _token_ids(model) | said


def _token_ids(model: GgufModel) -> dict[str, Any]:
    ids: dict[str, Any] = {"eos_token_id": list(end_token_ids(model))}
    for name, key in (("bos_token_id", "bos"), ("pad_token_id", "padding")):
        value = model.get(f"tokenizer.ggml.{key}_token_id")
        if value is not None:
            ids[name] = int(value)
    return ids


def end_token_ids(model: GgufModel) -> tuple[int, ...]:
    """Ids that end generation: those that the metadata declares, then those that llama.cpp knows by name."""
    declared = [model.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    tokens = model.required("tokenizer.ggml.tokens", list)
    known = {token: index for index, token in enumerate(tokens) if token in END_TOKENS}
    for marks, no_end in _NO_ENDS:
        if marks <= known.keys():
            known.pop(no_end, None)
    return tuple(dict.fromkeys(int(value) for value in [*declared, *known.values()] if value is not None))


def _dtype(model: GgufModel) -> str:
    """The number format of the matrices; bfloat16 for quantised ones, since their steps are coarser than bfloat16's."""
    kinds = {tensor.tensor_type for tensor in model.reader.tensors if len(tensor.shape) > 1}
    names = {kind: _DTYPES.get(kind, "bfloat16") for kind in kinds}
    return names[kinds.pop()] if len(kinds) == 1 else "bfloat16" if kinds - _DTYPES.keys() else "float32"


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


def _refuse_unread(model: GgufModel) -> None:
    prefix = f"{model.architecture}."
    is_unscaled = model.hyper("rope.scaling.type") == "none"
    for key in sorted(model.reader.fields):
        name = key.removeprefix(prefix)
        if name == key or name in _READ or (is_unscaled and name in _UNSCALED):
            continue
        if (value := model.get(key)) not in _NEUTRAL.get(name, ()):
            raise BadConfigError(f"{model.path.name}: metadata key {key} {show_value(value)} is not supported")


def _vocab_size(model: GgufModel) -> int:
    for tensor in model.reader.tensors:
        if tensor.name == "token_embd.weight":
            # GGUF lists dimensions innermost first: [hidden_size, vocab_size].
            return int(tensor.shape[1])
    raise BadConfigError(f"{model.path.name}: tensor token_embd.weight is missing")


def _shortest(value: float) -> float:
    return float(str(np.float32(value)))
