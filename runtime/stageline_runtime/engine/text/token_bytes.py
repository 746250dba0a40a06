"""The bytes that one token stands for, whatever its neighbours: what log probabilities are labelled with.

Decoding a single id loses bytes: half a character becomes U+FFFD. So the tokenizer's own spelling of the token is read
by the convention its decoder names: byte-level BPE spells each byte as one printable character (Radford et al. 2019);
sentencepiece spells a space as U+2581 and a lone byte as `<0x0A>`. Other decoders' tokens are decoded by themselves.
"""

import json
import re
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Final

from tokenizers import Tokenizer

from stageline_runtime.plan_bus.messages import TokenLogprobs

_LONE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "\u2581"
_KEPT_TOKENS: Final = 4096
"""Cache size in tokens, least recently used out first: alternatives are mostly the same few. About a megabyte."""


class TokenBytes:
    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self._kinds = _decoder_kinds(json.loads(backend.decoder.__getstate__())) if backend.decoder else frozenset()
        # Added tokens are spelled as they are, in any vocabulary.
        self._added = {index: token.content for index, token in backend.get_added_tokens_decoder().items()}
        self.numbers: Callable[[int], tuple[int, ...]] = lru_cache(_KEPT_TOKENS)(lambda index: tuple(self.of(index)))
        """Bytes of one token as a line of an answer has them."""

    def of(self, token_id: int) -> bytes:
        """Bytes of one token; none for an id that the tokenizer doesn't know."""
        added = self._added.get(token_id)
        if added is not None:
            return added.encode()
        spelled = self._backend.id_to_token(token_id)
        if spelled is None:
            return b""
        if "ByteLevel" in self._kinds:
            return _byte_level(spelled)
        if self._kinds & {"ByteFallback", "Metaspace"}:
            lone = _LONE_BYTE.fullmatch(spelled)
            return bytes.fromhex(lone[1]) if lone else spelled.replace(_SPACE_MARK, " ").encode()
        return str(self._backend.decode([token_id], skip_special_tokens=False)).encode()


def describe(token_id: int, logprobs: TokenLogprobs, token_bytes: TokenBytes) -> dict[str, object]:
    """One sampled token with its likeliest alternatives, best first, as the fields of a `TokenLogprob`.

    As the type itself they take ten times as long, which holds up all other answers where many are described at once.
    """
    numbers = token_bytes.numbers
    top = [{"token_id": other, "bytes": numbers(other), "logprob": value} for other, value in logprobs.top]
    return {"token_id": token_id, "bytes": numbers(token_id), "logprob": logprobs.logprob, "top_logprobs": top}


def _decoder_kinds(decoder: dict[str, object]) -> frozenset[str]:
    """Types of a decoder and of all the decoders it consists of."""
    parts = decoder.get("decoders")
    inner = [_decoder_kinds(part) for part in parts] if isinstance(parts, list) else []
    return frozenset({str(decoder["type"])}).union(*inner)


def _byte_level(spelled: str) -> bytes:
    bytes_of = _byte_of_character()
    if all(character in bytes_of for character in spelled):
        return bytes(bytes_of[character] for character in spelled)
    return spelled.encode()


@cache
def _byte_of_character() -> dict[str, int]:
    """Printable Latin-1 characters stand for themselves, the other bytes in order for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}
