"""One answer as vLLM generates it: converts its events to tokens, until a stop token or the limit. Pure.

The last token waits for the next event, which reports how much of the prompt was cached. An answer with structured
output is also checked against its grammar here, within the same CPU time limits as mask creation. vLLM's worker
applies masks, and this side accepts only tokens that the grammar admits. So a lost or wrong mask fails the request
and never produces wrong text.
"""

from collections.abc import Iterator
from typing import Final

from stageline_runtime.engine.core_api import AdmittedRequest
from stageline_runtime.engine.scheduling.scheduler import NewToken
from stageline_runtime.guided.grammar_walk import GrammarWalk
from stageline_runtime.plan_bus.messages import TokenLogprobs
from stageline_vllm.engine.generate_words import Choice, StreamEvent, VllmAnswerError, reported_logprobs

LOST_IN_WORKER: Final = "the grammar takes too long to follow, or became too complex, where masks are made"


class NotFollowedError(Exception):
    """The grammar doesn't admit a token, or can't be followed to it; which and why, as half a sentence."""


class AnswerProgress:
    """Tokens of one request, in order; `cached_tokens` once known."""

    def __init__(
        self, request: AdmittedRequest, grammar: GrammarWalk | None = None, lost_token: int | None = None
    ) -> None:
        """`grammar` is in its initial state; vLLM's worker draws `lost_token` where it lost the grammar.

        Raises:
            NotFollowedError: the grammar doesn't admit the tokens generated before.
        """
        self._request = request
        self._grammar = grammar
        self._lost_token = lost_token
        self._count = len(request.generated_token_ids)
        self._last: NewToken | None = None
        self.cached_tokens: int | None = None
        self._follow(request.generated_token_ids)

    def take(self, event: StreamEvent) -> list[NewToken]:
        """What the event adds; the last token is kept for `end`.

        Raises:
            VllmAnswerError: vLLM ended the answer itself, or failed.
        """
        if event.error is not None:
            raise VllmAnswerError(f"vLLM failed: {event.error.message or 'it does not say why'}")
        if event.cached_tokens is not None:
            self.cached_tokens = min(event.cached_tokens, len(self._request.prompt_token_ids))
        return [token for choice in event.choices for token in self._take_choice(choice)]

    def end(self) -> NewToken | None:
        """The last token; None where the stream ended before it."""
        return self._last

    def _take_choice(self, choice: Choice) -> Iterator[NewToken]:
        logprobs = self._logprobs(choice)
        for index, token in enumerate(choice.token_ids or ()):
            if self._last is not None:
                raise VllmAnswerError("vLLM went on after the answer's end")
            new = self._new(token, logprobs[index] if logprobs else None)
            if new.finished:
                self._last = new
            else:
                yield new
        if choice.finish_reason is not None and self._last is None:
            raise VllmAnswerError(f"vLLM ended the answer by itself: {choice.finish_reason}")

    def _new(self, token: int, logprobs: TokenLogprobs | None) -> NewToken:
        name = self._request.request_id
        try:
            self._follow((token,))
        except NotFollowedError as error:
            return NewToken(name, token, True, False, failure=str(error))
        self._count += 1
        stopped = token in self._request.stop_token_ids
        return NewToken(name, token, stopped or self._count >= self._request.max_new_tokens, stopped, logprobs)

    def _follow(self, token_ids: tuple[int, ...]) -> None:
        if self._grammar is None or not token_ids:
            return
        self._grammar.take(token_ids)
        if self._grammar.failure is not None:
            is_lost = token_ids == (self._lost_token,)
            raise NotFollowedError(LOST_IN_WORKER if is_lost else self._grammar.failure)

    def _logprobs(self, choice: Choice) -> list[TokenLogprobs]:
        count = self._request.sampling.num_top_logprobs
        if count is None:
            return []
        content = () if choice.logprobs is None else choice.logprobs.content or ()
        if len(content) != len(choice.token_ids or ()):
            raise VllmAnswerError("vLLM left out log probabilities that were asked for")
        return [reported_logprobs(sampled, count) for sampled in content]
