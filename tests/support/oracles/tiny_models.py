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


def write_early_exit_pair(directory: Path, *, num_layers: int = 24, draft_layers: int = 1) -> tuple[Path, Path]:
    """Write a Llama whose later layers change little, and its first layers as a model of their own, which mostly agrees
    with it for a fraction of the work; returns both directories.
    """
    from safetensors.torch import load_file, save_file

    target = write_tiny_llama(directory / "target", num_layers=num_layers)
    draft = write_tiny_llama(directory / "draft", num_layers=draft_layers)
    weights = load_file(target / "model.safetensors")
    for name, tensor in weights.items():
        is_late = name.startswith("model.layers.") and int(name.split(".")[2]) >= draft_layers
        if is_late and ("o_proj" in name or "down_proj" in name):
            tensor *= 0.02
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    kept = load_file(draft / "model.safetensors").keys()
    save_file({name: weights[name] for name in kept}, draft / "model.safetensors", metadata={"format": "pt"})
    return target, draft


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


def write_tiny_mistral(directory: Path, *, sliding_window: int | None = None, **fields: Any) -> Path:
    """Write a Mistral whose queries see `sliding_window` positions (None: all); returns `directory`."""
    from transformers import MistralConfig, MistralForCausalLM

    return write_tiny_family(directory, MistralConfig, MistralForCausalLM, sliding_window=sliding_window, **fields)


def write_tiny_qwen2(directory: Path, **fields: Any) -> Path:
    """Write a Qwen2 (query, key and value have biases, and no norms); returns `directory`."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return write_tiny_family(directory, Qwen2Config, Qwen2ForCausalLM, **fields)


def write_tiny_qwen2_moe(directory: Path, *, stacked: bool = False, **fields: Any) -> Path:
    """Write a Qwen2-MoE of eight experts and a shared one of another size; returns `directory`."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
    shared = {"shared_expert_intermediate_size": 80}
    return write_tiny_family(
        directory, Qwen2MoeConfig, Qwen2MoeForCausalLM, stacked=stacked, **experts | shared | fields
    )


def write_tiny_qwen3_moe(directory: Path, *, stacked: bool = False, **fields: Any) -> Path:
    """Write a Qwen3-MoE of eight experts; `stacked` keeps them as transformers 5 holds them; returns `directory`."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "head_dim": 24}
    return write_tiny_family(directory, Qwen3MoeConfig, Qwen3MoeForCausalLM, stacked=stacked, **experts | fields)


def write_tiny_mixtral(directory: Path, *, stacked: bool = False, **fields: Any) -> Path:
    """Write a Mixtral of four experts, under its own tensor names unless `stacked`; returns `directory`."""
    from transformers import MixtralConfig, MixtralForCausalLM

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return write_tiny_family(directory, MixtralConfig, MixtralForCausalLM, stacked=stacked, **experts | fields)


def write_tiny_gemma2(directory: Path, **fields: Any) -> Path:
    """Write a Gemma 2: capped scores and logits, every other layer with a short window; returns `directory`."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    capped = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0, "query_pre_attn_scalar": 24}
    own = {"head_dim": 24, "sliding_window": 20, "tie_word_embeddings": True} | capped
    return write_tiny_family(directory, Gemma2Config, Gemma2ForCausalLM, **own | fields)


def write_tiny_gemma3(directory: Path, **fields: Any) -> Path:
    """Write a Gemma 3 (text): normalised heads, two rotary bases, mostly short windows; returns `directory`."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
    }
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    own = {"head_dim": 24, "sliding_window": 20, "query_pre_attn_scalar": 24, "tie_word_embeddings": True}
    layers = {"layer_types": kinds, "rope_parameters": rope}
    return write_tiny_family(directory, Gemma3TextConfig, Gemma3ForCausalLM, **own | layers | fields)


def write_tiny_olmo2(directory: Path, **fields: Any) -> Path:
    """Write an OLMo 2: norms after the blocks, queries and keys normalised across heads; returns `directory`."""
    from transformers import Olmo2Config, Olmo2ForCausalLM

    return write_tiny_family(directory, Olmo2Config, Olmo2ForCausalLM, **fields)


def write_tiny_phi3(directory: Path, **fields: Any) -> Path:
    """Write a Phi-3: projections fused in the checkpoint, a window on all layers; returns `directory`."""
    from transformers import Phi3Config, Phi3ForCausalLM

    return write_tiny_family(directory, Phi3Config, Phi3ForCausalLM, **{"sliding_window": 24} | fields)


def write_tiny_granite(directory: Path, **fields: Any) -> Path:
    """Write a Granite: embedding, scores, residuals and logits are each scaled; returns `directory`."""
    from transformers import GraniteConfig, GraniteForCausalLM

    scales = {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7}
    return write_tiny_family(directory, GraniteConfig, GraniteForCausalLM, **scales | {"logits_scaling": 2.0} | fields)


def write_tiny_cohere2(directory: Path, **fields: Any) -> Path:
    """Write a Cohere 2: parallel blocks, rotary positions only where there are windows; returns `directory`."""
    from transformers import Cohere2Config, Cohere2ForCausalLM

    own = {"head_dim": 16, "sliding_window": 20, "tie_word_embeddings": True}
    return write_tiny_family(directory, Cohere2Config, Cohere2ForCausalLM, **own | fields)


def write_tiny_gpt_neox(directory: Path, **fields: Any) -> Path:
    """Write a GPT-NeoX: parallel blocks, rotary positions of a quarter of each head; returns `directory`."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    return write_tiny_family(directory, GPTNeoXConfig, GPTNeoXForCausalLM, **{"num_key_value_heads": 4} | fields)


def write_tiny_starcoder2(directory: Path, **fields: Any) -> Path:
    """Write a StarCoder2: biases, layer norms, a plain feed-forward block; returns `directory`."""
    from transformers import Starcoder2Config, Starcoder2ForCausalLM

    own = {"tie_word_embeddings": True}
    return write_tiny_family(directory, Starcoder2Config, Starcoder2ForCausalLM, **own | fields)


def write_tiny_family(
    directory: Path, config_class: Any, model_class: Any, *, stacked: bool = False, seed: int = 0, **fields: Any
) -> Path:
    """Four layers of width 64 but for what `fields` change, in float32."""
    common = _common(4, 64, 128, 4, 2, 512, 10_000.0) | {"tie_word_embeddings": False}
    config = config_class(**common | fields)
    return _write(directory, model_class, config, "float32", seed, True, save_original_format=not stacked)


def add_head(directory: Path, *, equal: bool) -> Path:
    """Put a head into a tied checkpoint: a copy of the embedding, or weights of its own; returns `directory`."""
    import torch
    from safetensors.torch import load_file, save_file

    path = directory / "model.safetensors"
    tensors = load_file(path)
    assert "lm_head.weight" not in tensors, "the model isn't tied"
    embedding = tensors["model.embed_tokens.weight"]
    drawn = 0.3 * torch.randn(embedding.shape, generator=torch.Generator().manual_seed(1))
    tensors["lm_head.weight"] = embedding.clone() if equal else drawn.to(embedding.dtype)
    save_file(tensors, path, metadata={"format": "pt"})
    return directory


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


def _write(
    directory: Path, model_class: Any, config: Any, dtype: str, seed: int, chat_template: bool, **saving: Any
) -> Path:
    import torch

    directory.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        # Norm weights start at one, biases at zero; random ones catch one that is skipped or taken from another layer.
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
            elif name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.3)
    model.to(getattr(torch, dtype)).save_pretrained(directory, **saving)
    write_tiny_tokenizer(directory, chat_template=chat_template)
    return directory
