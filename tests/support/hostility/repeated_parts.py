"""Bodies that are as large as they may be, all of one part again and again: each kind has cost a server something once.

None of these has a right answer: they are refused by what holds them, and cost what finding that out costs.
"""

from dataclasses import dataclass
from typing import Final

from processes.gateway_harness import MODEL

BODY_BYTES: Final = 4 * 1024 * 1024 - 1024
"""As large as a gateway takes."""


@dataclass(frozen=True, slots=True)
class Repeated:
    """`head`, then `item` with commas between as often as fits, then `tail`. A numbered item has a place for `%d`."""

    path: str
    head: bytes
    item: bytes
    tail: bytes
    is_numbered: bool = False

    def body(self, size_bytes: int = BODY_BYTES) -> bytes:
        room = size_bytes - len(self.head) - len(self.tail)
        count = max(1, room // (len(self.item) + (8 if self.is_numbered else 1)))
        items = (self.item % index for index in range(count)) if self.is_numbered else [self.item] * count
        return self.head + b",".join(items) + self.tail


CHATS: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
_PROMPT: Final = b'{"model":"%s","prompt":' % MODEL.encode()
_CHAT: Final = b'{"model":"%s","messages":[' % MODEL.encode()
_RESPONSE: Final = b'{"model":"%s",' % MODEL.encode()
_ASKED: Final = _RESPONSE + b'"max_tokens":1,'
_CALL: Final = b'{"role":"assistant","tool_calls":[{"id":"c","type":"function","function":{"name":"f","arguments":"['
"""Arguments are JSON inside of a string."""
_CUT: Final = b'{"id":"b","type":"function","function":{"name":"f","arguments":"{\\"a\\": \\"b"}}'
"""A call that the token limit cut off within a string."""
_BEHIND_A_CUT: Final = (
    b'{"role":"assistant","tool_calls":[%s,{"id":"c","type":"function","function":{"name":"f","arguments":"{\\"a\\":['
    % _CUT
)
REPEATED: Final[dict[str, Repeated]] = {
    "numbers for messages": Repeated(CHATS, _CHAT, b"1", b"]}"),
    "empty messages": Repeated(CHATS, _CHAT, b"{}", b"]}"),
    "tiny messages": Repeated(CHATS, _CHAT, b'{"role":"user","content":""}', b"]}"),
    "parts without type": Repeated(CHATS, _CHAT + b'{"role":"user","content":[', b'{"text":""}', b"]}]}"),
    "a message of many fields": Repeated(CHATS, _CHAT + b"{", b'"%d":1', b"}]}", is_numbered=True),
    "texts among ids": Repeated(COMPLETIONS, _PROMPT + b"[1,", b'""', b"]}"),
    "ids below zero": Repeated(COMPLETIONS, _PROMPT + b"[1,", b"-1111", b"]}"),
    "unknown fields": Repeated(COMPLETIONS, _PROMPT + b'"x",', b'"%d":1', b"}", is_numbered=True),
    "biases": Repeated(COMPLETIONS, _PROMPT + b'"x","logit_bias":{', b'"%d":999', b"}}", is_numbered=True),
    "stops": Repeated(COMPLETIONS, _PROMPT + b'"x","stop":[', b"11111", b"]}"),
    "tokens": Repeated("/detokenize", b'{"model":"%s","tokens":[' % MODEL.encode(), b'"aaa"', b"]}"),
    "items of nothing": Repeated("/v1/responses", _RESPONSE + b'"input":[', b"{}", b"]}"),
    "numbers for items": Repeated("/v1/responses", _RESPONSE + b'"input":[', b"1", b"]}"),
    "parts of an item": Repeated(
        "/v1/responses",
        _RESPONSE + b'"input":[{"role":"user","content":[',
        b'{"type":"input_text","text":1}',
        b"]}]}",
    ),
    "tools of nothing": Repeated("/v1/responses", _RESPONSE + b'"input":"x","tools":[', b"{}", b"]}"),
    "unknown fields of a response": Repeated(
        "/v1/responses", _RESPONSE + b'"input":"x",', b'"%d":1', b"}", is_numbered=True
    ),
    "blocks of nothing": Repeated("/v1/messages", _ASKED + b'"messages":[{"role":"user","content":[', b"{}", b"]}]}"),
    "turns of nothing": Repeated("/v1/messages", _ASKED + b'"messages":[', b"{}", b"]}"),
    "system of nothing": Repeated("/v1/messages", _ASKED + b'"messages":[],"system":[', b"1", b"]}"),
    "tools without names": Repeated(
        "/v1/messages", _ASKED + b'"messages":[{"role":"user","content":"x"}],"tools":[', b"{}", b"]}"
    ),
    "stop sequences": Repeated(
        "/v1/messages", _ASKED + b'"messages":[{"role":"user","content":"x"}],"stop_sequences":[', b"1", b"]}"
    ),
    "lists in lists": Repeated(COMPLETIONS, _PROMPT, b"[" * 50 + b"]" * 50, b"}"),
    "objects within arguments": Repeated(CHATS, _CHAT + _CALL, b"{}", b']"}}]}]}'),
    "objects behind a cut call": Repeated(CHATS, _CHAT + _BEHIND_A_CUT, b"[]", b']}"}}]}]}'),
    "objects behind a cut call to tokenize": Repeated("/tokenize", _CHAT + _BEHIND_A_CUT, b"[]", b']}"}}]}]}'),
    "objects behind a cut call of an item": Repeated(
        "/v1/responses",
        _RESPONSE + b'"input":[{"type":"function_call","call_id":"b","name":"f","arguments":"{\\"a\\": \\"b"},'
        b'{"type":"function_call","call_id":"c","name":"f","arguments":"{\\"a\\":[',
        b"[]",
        b']}"}]}',
    ),
    "numbers within arguments": Repeated(CHATS, _CHAT + _CALL, b"0", b']"}}]}]}'),
    "objects within arguments of an item": Repeated(
        "/v1/responses",
        _RESPONSE + b'"input":[{"type":"function_call","call_id":"c","name":"f","arguments":"[',
        b"{}",
        b']"}]}',
    ),
    "objects within arguments to tokenize": Repeated("/tokenize", _CHAT + _CALL, b"{}", b']"}}]}]}'),
    "a text of signs to choose": Repeated(
        COMPLETIONS, _PROMPT + b'"x","max_tokens":0,"structured_outputs":{"choice":["', b".", b'"]}}'
    ),
    "texts to choose": Repeated(
        COMPLETIONS, _PROMPT + b'"x","max_tokens":0,"structured_outputs":{"choice":[', b'"' + b"." * 4000 + b'"', b"]}}"
    ),
}
