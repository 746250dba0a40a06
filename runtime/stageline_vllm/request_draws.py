"""One request's draw parameters, from the engine container to the logits processor, inside vLLM's own `extra_args`.

A request with them runs at `temperature: 0` with vLLM's own sampling parameters neutral: the processor alone
decides its token. For a request without them vLLM samples greedily. Free of torch and of vllm.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from stageline_runtime.plan_bus.messages import RequestSampling

KEY: Final = "stageline_draws"
VERSION: Final = 3


class RequestDraws(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How one request's tokens are drawn, from its start or from where another group stopped."""

    version: int
    number: int
    """Distinguishes requests of one engine, even a later one with the same id."""
    sampling: RequestSampling
    """`num_prompt_tokens` is a position in vLLM's prompt: later ids were generated before."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end an answer with a grammar."""
    awaits_grammar: bool = False
    """Whether these tokens are discarded: they only show whether the grammar of the request of that number is
    compiled. An end token means yes, any other not yet."""


class DrawsError(ValueError):
    """The value under the key can't be read; the message is a sentence with the reason."""


def needs_draws(sampling: RequestSampling) -> bool:
    """Whether vLLM's plain argmax may differ from the token that this request needs."""
    return (
        sampling.temperature > 0.0
        or sampling.depends_on_history
        or sampling.has_exclusions
        or bool(sampling.logit_bias)
    )


def as_extra_args(draws: RequestDraws) -> dict[str, Any]:
    """Plain lists, texts and numbers, as JSON has them."""
    return {KEY: msgspec.to_builtins(draws)}


def read_draws(extra_args: Mapping[str, Any] | None) -> RequestDraws | None:
    """The draws in a request's `extra_args`; None when it has none.

    Raises:
        DrawsError: they are malformed, or of another version.
    """
    if extra_args is None or (found := extra_args.get(KEY)) is None:
        return None
    version = found[0] if isinstance(found, list | tuple) and found else None
    if version != VERSION:
        raise DrawsError(f"{KEY} is of version {version!r}; this processor reads {VERSION}")
    try:
        return msgspec.convert(found, RequestDraws)
    except msgspec.ValidationError as error:
        raise DrawsError(f"{KEY}: {error}") from error
