"""How the engine waits until vLLM's worker has a request's grammar: by a request whose tokens are discarded. Pure.

The worker compiles grammars beside its steps, one at a time, each up to a second of CPU. If a request were sampled
before its grammar is compiled, its step and every token in it would wait. So the engine first sends another
request, which ends once the grammar is compiled and stores it under the number of the request to follow. That costs
a step or two, so the engine omits it where the worker surely still keeps the grammar.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from stageline_runtime.engine.core_api import AdmittedRequest
from stageline_runtime.guided.json_grammars import MAX_KEPT
from stageline_vllm.engine.generate_words import StreamEvent, VllmAnswerError, asked_of
from stageline_vllm.request_draws import VERSION, RequestDraws, as_extra_args

MOST_TOKENS: Final = 32
"""Per such request; then another is made, so that slow steps don't look like a stall."""
_READY: Final = "stop"
_ANSWERS: Final = msgspec.json.Decoder(StreamEvent)


class WorkersGrammars:
    """Which grammars vLLM's worker surely keeps compiled: it keeps the `MAX_KEPT` that it used last."""

    def __init__(self, max_running: int) -> None:
        # How many others the worker may use since: without those of running answers and as many that are being
        # aborted.
        self._most_begun_since = MAX_KEPT - 2 * max_running
        self._num_begun = 0
        self._used: OrderedDict[str, int] = OrderedDict()
        """By schema, the number of the latest answer with structured output that is known to have used it."""

    def begin(self) -> int:
        """An answer with structured output begins; returns its number."""
        self._num_begun += 1
        return self._num_begun

    def surely_has(self, schema: str) -> bool:
        used = self._used.get(schema)
        return used is not None and self._num_begun - used <= self._most_begun_since

    def is_new(self, schema: str) -> bool:
        """Whether it probably has to be compiled: the worker used no such grammar recently."""
        return schema not in self._used

    def used(self, schema: str, number: int) -> None:
        """The worker had it for the answer of that number, after that began."""
        self._used[schema] = max(number, self._used.pop(schema, 0))
        if len(self._used) > MAX_KEPT:
            self._used.popitem(last=False)


def grammar_body(request: AdmittedRequest, number: int, eos_token_ids: Iterable[int]) -> bytes:
    """The body of the request that precedes one with structured output."""
    ends = tuple(sorted(eos_token_ids))
    sampling: dict[str, Any] = {
        "temperature": 0.0,
        "max_tokens": MOST_TOKENS,
        "stop_token_ids": ends,
        "ignore_eos": True,
        "detokenize": False,
        "extra_args": as_extra_args(RequestDraws(VERSION, number, request.sampling, ends, awaits_grammar=True)),
    }
    body = asked_of(request, f"{number}-{request.request_id}-grammar", ends[:1], sampling)
    return msgspec.json.encode(body | {"stream": False})


def is_compiled(lines: Iterable[bytes]) -> bool:
    """Whether the answer to `grammar_body` ended because the grammar is there.

    Raises:
        VllmAnswerError: it is no such answer.
    """
    try:
        answer = _ANSWERS.decode(b"\n".join(lines))
    except msgspec.DecodeError as error:
        raise VllmAnswerError(f"vLLM's answer can't be read: {error}") from error
    return any(choice.finish_reason == _READY for choice in answer.choices)
