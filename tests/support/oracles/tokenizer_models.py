"""Tokenizer directories of the two families that decode differently: byte-level, and SentencePiece-like."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

SPECIAL_TOKENS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")


def write_byte_level(
    directory: Path, extra_tokens: tuple[bytes, ...] = (), *, template_adds_bos: bool = False, **config: Any
) -> Path:
    """A byte-level tokenizer: four special tokens, 256 bytes, then `extra_tokens` (any byte strings)."""
    symbols = _byte_symbols()
    tokens = [*SPECIAL_TOKENS, *symbols.values(), *("".join(symbols[byte] for byte in extra) for extra in extra_tokens)]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    if template_adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return _save(directory, tokenizer, config)


def write_byte_fallback(directory: Path, **config: Any) -> Path:
    """A SentencePiece-like tokenizer: words with a leading space mark, a few characters, bytes for all else."""
    words = ["▁", "▁the", "▁a", "the", "a", "é", "▁café", "!", "\n", "0", "7"]
    tokens = ["<unk>", *SPECIAL_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return _save(directory, tokenizer, config)


def _byte_symbols() -> dict[int, str]:
    """The printable character that byte-level BPE writes for each byte: itself, or the next unused one from 256 on."""
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    unused = iter(sorted(character for character in alphabet if ord(character) >= 256))
    return {byte: chr(byte) if chr(byte) in alphabet else next(unused) for byte in range(256)}


def _save(directory: Path, tokenizer: Tokenizer, config: dict[str, Any]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"} | config
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return directory
