"""Log probabilities of a prompt from vLLM: in the unstreamed answer to a separate request, as streams have none. Pure.

vLLM reads no part of such a prompt from its cache, and leaves it there for the request that follows. For each token
it lists the token itself and the likeliest ones, each with its rank.
"""

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from stageline_runtime.engine.core_api import AdmittedRequest
from stageline_runtime.plan_bus.prompt_report import PromptReport, packed
from stageline_vllm.engine.generate_words import Choice, VllmAnswerError, asked_of

LOWEST: Final = -9999.0
"""OpenAI's value for "next to impossible"; vLLM may write null for it."""
ENTRY_BYTES: Final = 128
"""More than vLLM writes of a token, or of one of its alternatives."""


class Ranked(msgspec.Struct, frozen=True):
    logprob: float | None = None
    rank: int | None = None


class WholeAnswer(msgspec.Struct, frozen=True):
    """The body of an answer that is not streamed."""

    prompt_logprobs: tuple[dict[int, Ranked] | None, ...] | None = None
    choices: tuple[Choice, ...] = ()


_ANSWERS: Final = msgspec.json.Decoder(WholeAnswer)


def asks_for_prompt(request: AdmittedRequest) -> bool:
    """Whether log probabilities of the request's prompt have to be requested from vLLM."""
    told = max(1, request.prompt_told or 0)
    return request.sampling.num_top_prompt_logprobs is not None and told < len(request.prompt_token_ids)


def most_answer_bytes(request: AdmittedRequest) -> int:
    """Upper bound in bytes of vLLM's answer about the request's prompt."""
    count = request.sampling.num_top_prompt_logprobs
    return 0 if count is None else len(request.prompt_token_ids) * (1 + count) * ENTRY_BYTES


def prompt_body(request: AdmittedRequest, number: int) -> bytes:
    """The request to vLLM about the prompt: one token, which is discarded, and the log probabilities of the prompt."""
    sampling: dict[str, Any] = {
        "temperature": 0.0,
        "max_tokens": 1,
        "ignore_eos": True,
        "detokenize": False,
        "prompt_logprobs": request.sampling.num_top_prompt_logprobs,
    }
    body = asked_of(request, f"{number}-{request.request_id}-prompt", request.prompt_token_ids, sampling)
    return msgspec.json.encode(body | {"stream": False})


def read_prompt(lines: Iterable[bytes], request: AdmittedRequest) -> tuple[PromptReport, int]:
    """Log probabilities of the prompt tokens that weren't reported before, and the token that vLLM drew.

    Raises:
        VllmAnswerError: the answer lacks them.
    """
    try:
        answer = _ANSWERS.decode(b"\n".join(lines))
    except msgspec.DecodeError as error:
        raise VllmAnswerError(f"vLLM's answer can't be read: {error}") from error
    ids, entries = request.prompt_token_ids, answer.prompt_logprobs
    drawn = [token for choice in answer.choices for token in choice.token_ids or ()]
    if entries is None or len(entries) != len(ids) or not drawn:
        raise VllmAnswerError("vLLM left out log probabilities of the prompt")
    count = request.sampling.num_top_prompt_logprobs
    assert count is not None, "a prompt that nobody asks about"
    first = max(1, request.prompt_told or 0)
    told = [_told(token, entry, count) for token, entry in zip(ids[first:], entries[first:], strict=True)]
    top = [each for _, likeliest in told for each in likeliest]
    report = PromptReport(
        slot=0,
        generation=0,
        position=first,
        top_count=count,
        logprobs=packed("f", (_value(own) for own, _ in told)),
        ranks=packed("i", (own.rank or 0 for own, _ in told)),
        top_ids=packed("i", (token for token, _ in top)),
        top_logprobs=packed("f", (_value(one) for _, one in top)),
    )
    return report, drawn[0]


def _told(token: int, entry: dict[int, Ranked] | None, count: int) -> tuple[Ranked, list[tuple[int, Ranked]]]:
    """The token's own, and the `count` likeliest."""
    listed = {} if entry is None else entry
    likeliest = sorted(listed.items(), key=lambda each: each[1].rank or 0)[:count]
    if token not in listed or len(likeliest) < count or any(one.rank is None for one in listed.values()):
        raise VllmAnswerError(f"vLLM left out log probabilities of token {token} of the prompt")
    return listed[token], likeliest


def _value(one: Ranked) -> float:
    return LOWEST if one.logprob is None else max(one.logprob, LOWEST)
