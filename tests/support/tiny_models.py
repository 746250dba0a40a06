"""Tiny random-weight models in Hugging Face form, so that tests run the real loading path in milliseconds.

Each function writes a complete directory: `config.json`, `generation_config.json`, `model.safetensors`, a byte-level
BPE `tokenizer.json` that can encode any text, and `tokenizer_config.json` with a ChatML template. Weights follow from
`seed` alone.
"""

import json
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1 and 2; the last is end-of-sequence."""
MERGED_PAIRS = ("t h", "th e", "i n", "a n", "an d", "Ġ the", "Ġ a", "o u", "e r", "r e")
VOCAB_SIZE = len(SPECIAL_TOKENS) + 256 + len(MERGED_PAIRS)
EOS_TOKEN_ID = 2


def write_tiny_llama(
    directory: Path,
    *,
    num_layers: int = 4,
    hidden_size: int = 64,
    intermediate_size: int = 128,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int | None = None,
    context_length: int = 512,
    rope_theta: float = 10_000.0,
    tie_word_embeddings: bool = True,
    dtype: str = "float32",
    seed: int = 0,
    chat_template: bool = True,
) -> Path:
    """Write a Llama with random weights of `dtype` (`float32` or `bfloat16`); returns `directory`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **_common(num_layers, hidden_size, intermediate_size, num_heads, num_kv_heads, context_length, rope_theta),
        head_dim=head_dim or hidden_size // num_heads,
        tie_word_embeddings=tie_word_embeddings,
    )
    return _write(directory, LlamaForCausalLM, config, dtype, seed, chat_template)


def write_tiny_qwen3(
    directory: Path,
    *,
    num_layers: int = 4,
    hidden_size: int = 64,
    intermediate_size: int = 128,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    context_length: int = 512,
    rope_theta: float = 1_000_000.0,
    tie_word_embeddings: bool = True,
    dtype: str = "float32",
    seed: int = 0,
    chat_template: bool = True,
) -> Path:
    """Write a Qwen3 (normalised q and k; `head_dim` differs from `hidden_size / num_heads`); returns `directory`."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        **_common(num_layers, hidden_size, intermediate_size, num_heads, num_kv_heads, context_length, rope_theta),
        head_dim=head_dim,
        tie_word_embeddings=tie_word_embeddings,
    )
    return _write(directory, Qwen3ForCausalLM, config, dtype, seed, chat_template)


def write_tiny_tokenizer(directory: Path, *, chat_template: bool = True) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` for a vocabulary of `VOCAB_SIZE` tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = [pair.replace(" ", "") for pair in MERGED_PAIRS]
    vocab = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet, *merged])}
    merges = [(left, right) for left, right in (pair.split(" ") for pair in MERGED_PAIRS)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[1],
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[2],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
    }
    if chat_template:
        settings["chat_template"] = CHAT_TEMPLATE
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


def _common(
    num_layers: int,
    hidden_size: int,
    intermediate_size: int,
    num_heads: int,
    num_kv_heads: int,
    context_length: int,
    rope_theta: float,
) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": context_length,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "bos_token_id": 1,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": EOS_TOKEN_ID,
        # Wider than the usual 0.02: greedy choices of a random model then have clear margins and varied tokens.
        "initializer_range": 0.3,
    }


def _write(directory: Path, model_class: Any, config: Any, dtype: str, seed: int, chat_template: bool) -> Path:
    import torch

    directory.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        # Norm weights start at one; random ones catch a norm that is skipped or taken from another layer.
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    write_tiny_tokenizer(directory, chat_template=chat_template)
    return directory
