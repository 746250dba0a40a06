"""Qwen2: a Llama with biases of query, key and value, and windows in some layers."""

from collections.abc import Callable, Sequence

from stageline_runtime.model_facts.families import llama
from stageline_runtime.model_facts.families.reading import read_decoder, read_window
from stageline_runtime.model_facts.hyperparameters import ModelConfig, Windows
from stageline_runtime.model_facts.model_fields import Fields, UnsupportedModelError, names, positive, required

layer = llama.layer


def read(fields: Fields) -> ModelConfig:
    return read_decoder(fields, attention_bias=True, windows=read_windows(fields, from_layer), default_kv_heads=32)


def from_layer(index: int, first: int) -> bool:
    return index >= first


def read_windows(fields: Fields, is_windowed: Callable[[int, int], bool]) -> Windows:
    """No windows unless `use_sliding_window`; then by `layer_types`, or else by a layer and `max_window_layers`."""
    num_layers = positive(fields, "num_hidden_layers")
    window = read_window(fields, 4096) if fields.get("use_sliding_window") else None
    kinds = names(fields, "layer_types")
    if kinds is not None:
        return _of_kinds(kinds, window, num_layers)
    bound = required({"max_window_layers": 28} | fields, "max_window_layers", int)
    return tuple(window if is_windowed(index, bound) else None for index in range(num_layers))


def _of_kinds(kinds: Sequence[str], window: int | None, num_layers: int) -> Windows:
    if len(kinds) != num_layers:
        raise UnsupportedModelError(f"layer_types names {len(kinds)} layers, but num_hidden_layers is {num_layers}")
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedModelError(
            f"layer_types {unknown[0]!r} is not supported: full_attention, sliding_attention are"
        )
    if window is None and "sliding_attention" in kinds:
        raise UnsupportedModelError("layer_types has 'sliding_attention', but sliding_window is off")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
