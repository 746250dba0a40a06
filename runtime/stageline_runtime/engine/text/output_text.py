"""One request's output as text: tokens in, releasable text out, until a stop string or the end. Pure.

Tokens are taken one at a time, so where the output ends does not depend on how they arrived. A stop token (end of
sequence among them) counts as generated and is reported among the ids, but never shows in the text, nor among the log
probabilities.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stageline_api.engine_http import TokenLogprob
from stageline_runtime.engine.core_api import AdmittedRequest
from stageline_runtime.engine.text.detokenizer import IncrementalDetokenizer
from stageline_runtime.engine.text.stop_strings import StopStrings
from stageline_runtime.engine.text.token_logprobs import describe
from stageline_runtime.engine.text.tokenizer import EngineTokenizer
from stageline_runtime.plan_bus.messages import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Piece:
    """What a push or the end released. `stopped`: a stop string is complete and the output ends here."""

    text: str
    token_ids: tuple[int, ...]
    stopped: bool
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of the tokens that show in the text, when the request asked for them."""


class OutputText:
    """Text of one request's output."""

    def __init__(self, tokenizer: EngineTokenizer, request: AdmittedRequest) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stops = StopStrings(request.stop)
        self._hidden_token_ids = request.stop_token_ids
        self.completion_tokens = 0
        """Tokens sampled so far: stop tokens count, and so do all tokens that a stop string lies in."""
        self._relayed_ahead = 0
        """Characters that the client has of text still to be released."""

    def resume(self, token_ids: Sequence[int], relayed_characters: int | None) -> Piece:
        """Take ids generated before; returns the text of them that the client lacks, and how many of the ids count.

        `relayed_characters` is what the client has of the output's text; None: what was released after these ids.
        """
        piece = self.push(token_ids)
        if relayed_characters is None:
            return replace(piece, text="")
        self._relayed_ahead = max(0, relayed_characters - len(piece.text))
        return replace(piece, text=piece.text[relayed_characters:])

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> Piece:
        """Take sampled tokens, up to the one that completes a stop string; ids after it are dropped."""
        texts: list[str] = []
        described: list[TokenLogprob] = []
        for count, index in enumerate(token_ids, start=1):
            self.completion_tokens += 1
            if index in self._hidden_token_ids:
                continue
            if logprobs:
                described.append(describe(index, logprobs[count - 1], self._token_bytes))
            match = self._stops.push(self._detokenizer.push((index,)))
            texts.append(match.text)
            if match.matched:
                return Piece(self._unseen("".join(texts)), tuple(token_ids[:count]), True, tuple(described))
        return Piece(self._unseen("".join(texts)), tuple(token_ids), False, tuple(described))

    def finish(self) -> Piece:
        """The end of the tokens: releases what was held back, unless that completes a stop string."""
        match = self._stops.push(self._detokenizer.flush())
        if match.matched:
            return Piece(self._unseen(match.text), (), True)
        return Piece(self._unseen(match.text + self._stops.flush()), (), False)

    def _unseen(self, text: str) -> str:
        """What of newly released text the client doesn't have yet."""
        unseen = text[self._relayed_ahead :]
        self._relayed_ahead -= len(text) - len(unseen)
        return unseen
