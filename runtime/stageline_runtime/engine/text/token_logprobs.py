"""Log probabilities as the stage sent them, by id, put into the words of the engine's HTTP interface."""

from stageline_api.engine_http import TokenLogprob, TopLogprob
from stageline_runtime.engine.text.token_bytes import TokenBytes
from stageline_runtime.plan_bus.messages import TokenLogprobs


def describe(token_id: int, logprobs: TokenLogprobs, token_bytes: TokenBytes) -> TokenLogprob:
    """One sampled token with its likeliest alternatives, best first."""
    top = tuple(
        TopLogprob(token_id=other, bytes=tuple(token_bytes.of(other)), logprob=value) for other, value in logprobs.top
    )
    return TokenLogprob(
        token_id=token_id, bytes=tuple(token_bytes.of(token_id)), logprob=logprobs.logprob, top_logprobs=top
    )
