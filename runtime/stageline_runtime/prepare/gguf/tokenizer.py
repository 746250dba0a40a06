"""Builds `tokenizer.json` and `tokenizer_config.json` from a GGUF file's metadata.

Only byte-level BPE (`tokenizer.ggml.model` = `gpt2`) is built, with the pre-tokenizers named below. A GGUF file names
its pre-tokenizer and does not describe it, so an unknown name is refused, and so is none: guessing would split text
wrongly in silence.
"""

from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from stageline_runtime.prepare.errors import BadConfigError
from stageline_runtime.prepare.gguf.metadata import END_TOKENS, GgufModel


class TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5


WORDS_AND_DIGITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The split that Llama 3 and Qwen share, except for how many digits stay together."""
_TEMPLATES = "tokenizer.chat_templates"
PRE_TOKENIZERS = ("gpt-2", "smollm", "qwen2", "llama-bpe")


def build_tokenizer(model: GgufModel) -> Tokenizer:
    """The tokenizer that the file's metadata describes.

    Raises:
        BadConfigError: the kind of tokenizer, its pre-tokenizer or a token type isn't supported.
    """
    kind = model.required("tokenizer.ggml.model", str)
    if kind != "gpt2":
        raise BadConfigError(f"{model.path.name}: tokenizer.ggml.model {kind!r} is not supported; supported: gpt2")
    pre = _pre_name(model)
    tokens, types = _tokens(model)
    # Unused ids only pad the embedding matrix; in the vocabulary they would be text that encodes to them.
    vocab = {token: index for index, token in enumerate(tokens) if types[index] != TokenType.UNUSED}
    merges = [_merge(model, merge) for merge in model.required("tokenizer.ggml.merges", list)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, tokens, types)
    tokenizer.post_processor = _post_processor(model, tokens)
    return tokenizer


def tokenizer_config(model: GgufModel) -> dict[str, Any]:
    """The content of `tokenizer_config.json`. Without a chat template in the file the key is left out."""
    tokens = model.required("tokenizer.ggml.tokens", list)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": adds_bos(model),
        "clean_up_tokenization_spaces": False,
        "model_max_length": model.required_hyper("context_length"),
    }
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding"), ("unk_token", "unknown")):
        index = model.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None:
            config[name] = _token_at(model, tokens, int(index), key)
    template = model.get("tokenizer.chat_template")
    named = {str(name): model.get(f"tokenizer.chat_template.{name}") for name in model.get(_TEMPLATES) or ()}
    templates = {name: text for name, text in ({"default": template} | named).items() if text is not None}
    if named:
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    elif template is not None:
        config["chat_template"] = template
    return config


def adds_bos(model: GgufModel) -> bool:
    """Whether encoding a text puts the beginning-of-sequence token first. Undeclared, only Llama 3 files mean yes."""
    declared = model.get("tokenizer.ggml.add_bos_token")
    return bool(declared) if declared is not None else _pre_name(model) == "llama-bpe"


def _pre_name(model: GgufModel) -> str:
    pre = model.get("tokenizer.ggml.pre")
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise BadConfigError(
            f"{model.path.name}: tokenizer.ggml.pre {'is missing' if pre is None else f'{pre!r} is not supported'}; "
            f"supported: {known}. It says how text is split before it becomes tokens; convert the model again"
        )
    return str(pre)


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    match pre:
        case "smollm":
            digits = pre_tokenizers.Digits(individual_digits=True)
            return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
        case "qwen2" | "llama-bpe":
            pattern = Regex(WORDS_AND_DIGITS.format(digits="" if pre == "qwen2" else "{1,3}"))
            split = pre_tokenizers.Split(pattern, behavior="isolated")
            return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        case _:
            return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _post_processor(model: GgufModel, tokens: list[str]) -> processors.PostProcessor:
    if model.get("tokenizer.ggml.add_eos_token"):
        raise BadConfigError(f"{model.path.name}: tokenizer.ggml.add_eos_token true is not supported")
    byte_level = processors.ByteLevel(trim_offsets=False)
    if not adds_bos(model):
        return byte_level
    index = int(model.required("tokenizer.ggml.bos_token_id", int))
    bos = _token_at(model, tokens, index, "bos")
    template = processors.TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", f"{bos}:1", "$B:1"], special_tokens=[(bos, index)]
    )
    return processors.Sequence([byte_level, template])


def _tokens(model: GgufModel) -> tuple[list[str], list[int]]:
    tokens = model.required("tokenizer.ggml.tokens", list)
    types = model.get("tokenizer.ggml.token_type") or [TokenType.NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise BadConfigError(f"{model.path.name}: {len(tokens)} tokens but {len(types)} token types")
    unknown = sorted(set(types) - {int(kind) for kind in TokenType})
    if unknown:
        raise BadConfigError(f"{model.path.name}: tokenizer.ggml.token_type {unknown[0]} is not supported")
    return tokens, types


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    for token, kind in zip(tokens, types, strict=True):
        match TokenType.CONTROL if token in END_TOKENS else kind:
            case TokenType.CONTROL:
                tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
            case TokenType.USER_DEFINED:
                tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
            case _:
                pass


def _merge(model: GgufModel, merge: str) -> tuple[str, str]:
    left, separator, right = merge.partition(" ")
    if not (left and separator and right):
        raise BadConfigError(f"{model.path.name}: tokenizer.ggml.merges has the malformed entry {merge!r}")
    return left, right


def _token_at(model: GgufModel, tokens: list[str], index: int, key: str) -> str:
    if not 0 <= index < len(tokens):
        raise BadConfigError(f"{model.path.name}: tokenizer.ggml.{key}_token_id {index} is outside the vocabulary")
    return str(tokens[index])
