"""The tokens that a request excludes from its answer, validated and as token ids for the sampler. No I/O.

Guarantees that some token can always be sampled: it refuses a request if its exclusions together might leave none.
It also refuses exclusions with structured output, since the grammar may admit only excluded tokens at some
position.
"""

from collections.abc import Iterator
from dataclasses import replace

import msgspec

from stageline_api.engine_http import ErrorCode, SamplingParams
from stageline_runtime.engine.core_api import AdmittedRequest
from stageline_runtime.engine.errors import PromptError
from stageline_runtime.engine.text.tokenizer import EngineTokenizer
from stageline_runtime.plan_bus.messages import RequestSampling


def with_exclusions(
    admitted: AdmittedRequest, sampling: SamplingParams, tokenizer: EngineTokenizer, vocab_size: int
) -> AdmittedRequest:
    """`admitted` with the exclusions of `sampling`, which has ids known to be in the vocabulary.

    Raises:
        PromptError: naming `min_tokens`, `allowed_token_ids` or `bad_words`, which can't be kept to.
    """
    if sampling.guide is not None:
        name = next(_names(sampling))
        message = f"{name} can't be combined with a guide of the answer, which may admit nothing else."
        raise PromptError(ErrorCode.INVALID_VALUE, message, param=name)
    if sampling.min_tokens > admitted.max_new_tokens:
        message = (
            f"min_tokens is {sampling.min_tokens}, but max_tokens, or what the context leaves, is "
            f"{admitted.max_new_tokens}."
        )
        raise PromptError(ErrorCode.INVALID_VALUE, message, param="min_tokens")
    excluding = msgspec.structs.replace(
        admitted.sampling,
        min_tokens=sampling.min_tokens,
        end_token_ids=tuple(sorted(admitted.stop_token_ids)) if sampling.min_tokens else (),
        allowed_token_ids=tuple(sorted(set(sampling.allowed_token_ids))),
        bad_words=tuple(dict.fromkeys(ids for word in sampling.bad_words for ids in _written(word, tokenizer))),
    )
    _check_something_is_left(excluding, sampling, vocab_size)
    return replace(admitted, sampling=excluding)


def _names(sampling: SamplingParams) -> Iterator[str]:
    """The fields that exclude something."""
    if sampling.min_tokens:
        yield "min_tokens"
    if sampling.bad_words:
        yield "bad_words"
    if sampling.allowed_token_ids:
        yield "allowed_token_ids"


def _written(word: str, tokenizer: EngineTokenizer) -> Iterator[tuple[int, ...]]:
    """The ids of `word` at the start of a text, and after a space, where most tokenizers encode it differently."""
    bare = word.lstrip()
    for text in (bare, " " + bare):
        ids = tokenizer.encode(text, add_special_tokens=False, param="bad_words") if bare else ()
        if not ids:
            message = f"bad_words has {word!r}, which this model's tokenizer writes with no token."
            raise PromptError(ErrorCode.INVALID_VALUE, message, param="bad_words")
        yield ids


def _check_something_is_left(excluding: RequestSampling, sampling: SamplingParams, vocab_size: int) -> None:
    # A word's last token counts as if it were excluded everywhere: which of them are at one place isn't known before.
    excluded = {word[-1] for word in excluding.bad_words} | set(excluding.end_token_ids)
    allowed = excluding.allowed_token_ids
    left = len(set(allowed) - excluded) if allowed else vocab_size - len(excluded)
    if left < 1:
        names = list(_names(sampling))
        message = f"{' and '.join(names)} may leave no token to generate."
        raise PromptError(ErrorCode.INVALID_VALUE, message, param=names[-1])
