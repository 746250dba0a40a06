"""`POST /inference/v1/generate` of vLLM: the body for an admitted request, and the parsed lines of the answer. Pure.

The engine sends vLLM token ids and receives token ids in a stream. vLLM samples greedily; for other sampling the
logits processor receives the parameters (`request_draws`). The engine decides by the ids where an answer ends, so
vLLM's own end-of-sequence check is off. The edge applies stop strings. Choices of one prompt (`n`) are separate
requests that differ in their noise.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import msgspec

from stageline_runtime.engine.core_api import AdmittedRequest
from stageline_runtime.plan_bus.messages import RequestSampling, TokenLogprobs
from stageline_vllm.request_draws import VERSION, RequestDraws, as_extra_args, needs_draws

GENERATE_PATH: Final = "/inference/v1/generate"
_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"
SHOWN_CHARACTERS: Final = 300


class Candidate(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float


class SampledCandidate(Candidate, frozen=True):
    """The sampled token; `top_logprobs` has it first, then the likeliest others."""

    top_logprobs: tuple[Candidate, ...] = ()


class ChoiceLogprobs(msgspec.Struct, frozen=True):
    content: tuple[SampledCandidate, ...] | None = None


class Choice(msgspec.Struct, frozen=True):
    token_ids: tuple[int, ...] | None = None
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens_details: PromptDetails | None = None


class ErrorWords(msgspec.Struct, frozen=True):
    message: str = ""


class StreamEvent(msgspec.Struct, frozen=True):
    """One `data:` line."""

    choices: tuple[Choice, ...] = ()
    usage: Usage | None = None
    error: ErrorWords | None = None

    @property
    def cached_tokens(self) -> int | None:
        details = None if self.usage is None else self.usage.prompt_tokens_details
        return None if details is None else details.cached_tokens


_ABOUT_REQUEST: Final = frozenset(
    {
        HTTPStatus.BAD_REQUEST,
        HTTPStatus.NOT_FOUND,  # the model or the adapter that it names
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        HTTPStatus.UNPROCESSABLE_ENTITY,
    }
)
_EVENTS: Final = msgspec.json.Decoder(StreamEvent)


class VllmAnswerError(Exception):
    """vLLM sent data that is not part of an answer; the message is a sentence about it."""


def generate_body(request: AdmittedRequest, number: int, eos_token_ids: Iterable[int]) -> bytes:
    """The body for vLLM; `number` distinguishes this request from all others of this engine."""
    sampling: dict[str, Any] = {
        "temperature": 0.0,
        "max_tokens": request.max_new_tokens - len(request.generated_token_ids),
        "stop_token_ids": sorted(request.stop_token_ids),
        "ignore_eos": True,
        "detokenize": False,
    }
    if (top := request.sampling.num_top_logprobs) is not None:
        # vLLM lists the sampled token first; one more keeps all the requested alternatives.
        sampling["logprobs"] = top + 1
    if needs_draws(request.sampling):
        ends = tuple(sorted(eos_token_ids)) if request.sampling.json_schema is not None else ()
        sampling["extra_args"] = as_extra_args(RequestDraws(VERSION, number, request.sampling, ends))
    ids = (*request.prompt_token_ids, *request.generated_token_ids)
    body = asked_of(request, f"{number}-{request.request_id}", ids, sampling)
    return msgspec.json.encode(body | {"stream": True, "stream_options": {"include_usage": True}})


def asked_of(
    request: AdmittedRequest, request_id: str, token_ids: tuple[int, ...], sampling: dict[str, Any]
) -> dict[str, Any]:
    """The common fields of every vLLM request for an admitted request."""
    body: dict[str, Any] = {
        "request_id": request_id,
        "token_ids": token_ids,
        "sampling_params": sampling,
        "priority": request.priority,
    }
    if request.cache_salt is not None:
        body["cache_salt"] = request.cache_salt
    if request.adapter is not None:
        body["model"] = request.adapter
    return body


def warm_up_body(eos_token_ids: Iterable[int]) -> bytes:
    """One token, for which vLLM's worker has to read the tokenizer as grammars need it."""
    ends = tuple(sorted(eos_token_ids))
    guided = RequestSampling(temperature=0.0, json_schema="{}")
    sampling = {
        "temperature": 0.0,
        "max_tokens": 1,
        "ignore_eos": True,
        "detokenize": False,
        "extra_args": as_extra_args(RequestDraws(VERSION, 0, guided, ends, awaits_grammar=True)),
    }
    return msgspec.json.encode(
        {"request_id": "warm-up", "token_ids": ends[:1] or (0,), "sampling_params": sampling, "stream": True}
    )


def read_event(line: bytes) -> StreamEvent | None:
    """One parsed line of the stream; None for its last.

    Raises:
        VllmAnswerError: the line can't be parsed.
    """
    data = line.removeprefix(_DATA).strip()
    if data == _DONE:
        return None
    try:
        return _EVENTS.decode(data)
    except msgspec.DecodeError as error:
        raise VllmAnswerError(f"vLLM's answer can't be read: {error}") from error


def error_words(lines: Iterable[bytes]) -> str:
    """The message in the body of a refusal, or the start of the body."""
    body = b"\n".join(lines)
    try:
        error = _EVENTS.decode(body).error
    except msgspec.DecodeError:
        error = None
    words = error.message if error is not None and error.message else body.decode("utf-8", errors="replace")
    return words if len(words) <= SHOWN_CHARACTERS else words[:SHOWN_CHARACTERS] + "…"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A status of vLLM's server other than 200."""

    words: str
    is_about_request: bool
    """No other group would take it either. Otherwise one may: the server could not work, or not now."""


def refusal_of(status: int, lines: Iterable[bytes]) -> Refusal:
    """What a status and its body mean.

    vLLM itself sends 400, 404, 422, 500 and 503, and 401 where it was given another key than the engine's. 408, 429 and
    the like come from what a person has put into its server, and are no fault of the request.
    """
    words = f"({status}): {error_words(lines)}"
    if status == HTTPStatus.UNAUTHORIZED:
        words += ". It wants another key than the engine's: all containers of a group must be of one version"
    return Refusal(words, is_about_request=status in _ABOUT_REQUEST)


def reported_logprobs(sampled: SampledCandidate, count: int) -> TokenLogprobs:
    """The sampled token's, and the `count` likeliest of all, likeliest first."""
    likeliest = sorted(sampled.top_logprobs, key=lambda each: -each.logprob)[:count]
    return TokenLogprobs(sampled.logprob, tuple((each.token_id, each.logprob) for each in likeliest))
