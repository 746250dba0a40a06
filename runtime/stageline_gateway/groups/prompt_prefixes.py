"""Names the prefixes of a prompt by their content, to find a group whose cache holds a long one. Pure.

A name is the hash of the prompt up to some place, and starts with everything that separates caches (salt, adapter).
Prompts with the same prefix share the same places: near the start every `STEP` bytes, then at growing distances, and at
the ends of a chat's last messages, where the next message follows. Engines repeat the names and don't know how they are
made; all gateways of a model make the same ones.
"""

import json
from array import array
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from itertools import accumulate
from typing import Final, assert_never

from stageline_api.engine_http import ChatPrompt, GenerateRequest, PromptPrefix, TextPrompt, TokenPrompt

STEP: Final = 256
"""Bytes, about 64 tokens: a shorter prefix is cheaper to compute again than to look up."""
EVEN_STEPS: Final = 16
GROWTH: Final = 1.3
LAST_MESSAGES: Final = 12
LONGEST: Final = 1 << 20
"""Bytes: naming a longer prefix would occupy the event loop too long."""
NAME_BYTES: Final = 6


def prefixes_of(request: GenerateRequest) -> tuple[PromptPrefix, ...]:
    """Beginnings of the request's prompt, the shortest first, each with its share of the whole."""
    parts = list(_parts_of(request))
    ends = list(accumulate(map(len, parts)))
    total = ends[-1] if ends else 0
    if not total:
        return ()
    places = {end for end in ends[-LAST_MESSAGES:] if STEP <= end <= LONGEST} | set(_spread(min(total, LONGEST)))
    content = memoryview(b"".join(parts)[:LONGEST])
    digest = blake2b(_apart(request), digest_size=NAME_BYTES)
    named: list[PromptPrefix] = []
    start = 0
    for place in sorted(places):
        digest.update(content[start:place])
        named.append((digest.hexdigest(), place / total))
        start = place
    return tuple(named)


def _apart(request: GenerateRequest) -> bytes:
    parts = (request.cache_salt or "", request.adapter or "", str(type(request.prompt).__struct_config__.tag))
    return "\0".join(parts).encode(errors="surrogatepass")


def _spread(total: int) -> Iterator[int]:
    place = STEP
    while place <= total:
        yield place
        place += STEP if place < STEP * EVEN_STEPS else int(place * (GROWTH - 1))


def _parts_of(request: GenerateRequest) -> Iterator[bytes]:
    """The prompt in chunks, one per message: equal chunks are equal to the model."""
    match request.prompt:
        case TokenPrompt(token_ids=token_ids):
            # An id that doesn't fit is in no vocabulary: the engine refuses it.
            with suppress(OverflowError):
                yield array("i", token_ids).tobytes()
        case TextPrompt(text=text):
            yield text.encode(errors="surrogatepass")
        case ChatPrompt() as chat:
            yield _before_messages(chat)
            for message in chat.messages:
                calls = "".join(call.to_json().decode() for call in message.tool_calls)
                content = message.content or ("null" if message.is_content_null else "")
                parts = (message.role, message.name or "", message.tool_call_id or "", calls, content)
                thoughts = () if message.reasoning is None else (message.reasoning,)
                yield "\0".join((*parts, *thoughts, "")).encode(errors="surrogatepass")
        case _:
            assert_never(request.prompt)


def _before_messages(chat: ChatPrompt) -> bytes:
    tools = "".join(tool.to_json().decode() for tool in chat.tools)
    arguments = json.dumps(chat.template_arguments, sort_keys=True) if chat.template_arguments else ""
    return f"{tools}{arguments}{chat.reasoning_effort or ''}".encode(errors="surrogatepass")
