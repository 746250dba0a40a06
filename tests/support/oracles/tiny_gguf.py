"""Writes GGUF files from tiny Hugging Face models, in the layout that llama.cpp's converter gives them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.numpy import load_file

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_tiny_gguf(
    path: Path,
    model_dir: Path,
    *,
    quantization: GGMLQuantizationType = GGMLQuantizationType.Q8_0,
    overrides: dict[str, Any] | None = None,
    extra_tensors: dict[str, npt.NDArray[np.float32]] | None = None,
    left_out: frozenset[str] = frozenset(),
    renamed_tokens: dict[str, str] | None = None,
) -> Path:
    """Write the float32 model in `model_dir` as GGUF; matrices quantised, norms in float32.

    `overrides` replaces metadata values by key (`None` leaves the key out); `left_out` names GGUF tensors to omit.
    """
    config = json.loads((model_dir / "config.json").read_text())
    architecture = config["model_type"]
    writer = GGUFWriter(path, architecture)
    _add_metadata(writer, config, model_dir, overrides or {}, renamed_tokens or {})
    for name, array in load_file(model_dir / "model.safetensors").items():
        gguf_name = _gguf_name(name)
        if gguf_name in left_out:
            continue
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            array = _interleave_halves(array, heads)
        if array.ndim == 1:
            writer.add_tensor(gguf_name, array)
        else:
            writer.add_tensor(gguf_name, quantize(array, quantization), raw_dtype=quantization)
    for name, array in (extra_tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_metadata(
    writer: GGUFWriter,
    config: dict[str, Any],
    model_dir: Path,
    overrides: dict[str, Any],
    renamed_tokens: dict[str, str],
) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    tokenizer = json.loads((model_dir / "tokenizer.json").read_text())
    vocab = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    control = {token["content"] for token in tokenizer["added_tokens"]}
    writer.add_token_list([renamed_tokens.get(token, token) for token, _ in vocab])
    writer.add_token_types([3 if token in control else 1 for token, _ in vocab])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    settings = json.loads((model_dir / "tokenizer_config.json").read_text())
    strings = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.chat_template": settings.get("chat_template"),
        **overrides,
    }
    for key, value in strings.items():
        match value:
            case None:
                continue
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case list():
                writer.add_array(key, value)
            case _:
                writer.add_string(key, value)


def _gguf_name(name: str) -> str:
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[rest.removesuffix('.weight')]}.weight"


def _interleave_halves(array: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Alternate the rows of each head's two halves, for llama.cpp's rotary embedding. Shape `[rows, columns]` kept."""
    rows, columns = array.shape
    return array.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
