"""One request's output as text: tokens in, releasable text out, until a stop string or the end. Pure.

Tokens are processed one at a time, so the end of the output does not depend on how they arrived. A stop token
(including end of sequence) counts as generated and is reported among the ids. It never appears in the text, nor
among the log probabilities unless the request asks for it.

For an output that another engine started, the text is rebuilt from its ids, one at a time. So the held-back text
(half a character, a possible stop string) is the same, and only the text that the client lacks is sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from stageline_api.engine_http import ErrorCode, FinishReason, ThoughtStart, ToolCallFormat
from stageline_runtime.engine.core_api import AdmittedRequest
from stageline_runtime.engine.errors import PromptError
from stageline_runtime.engine.text.detokenizer import IncrementalDetokenizer, StopMatch, StopStrings
from stageline_runtime.engine.text.open_thoughts import CLOSING, OPENING
from stageline_runtime.engine.text.packed_logprobs import ListedToken, PackedLogprobs
from stageline_runtime.engine.text.tokenizer import EngineTokenizer
from stageline_runtime.engine.text.told_prompt import ToldPrompt
from stageline_runtime.plan_bus.messages import TokenLogprobs

_CALL_TAGS: Final = ("<tool_call>", "</tool_call>")
_CALL_MARKS: Final = {ToolCallFormat.ARRAY: ("[TOOL_CALLS]",), ToolCallFormat.OBJECT: ("<|python_tag|>",)}


@dataclass(frozen=True, slots=True)
class Piece:
    """What a push or the end released. `stopped`: a stop string is complete and the output ends here."""

    text: str
    token_ids: tuple[int, ...]
    stopped: bool
    logprobs: tuple[ListedToken, ...] = ()
    """Of the tokens that are listed, when the request asked for them."""


class OutputText:
    def __init__(self, tokenizer: EngineTokenizer, request: AdmittedRequest) -> None:
        hidden = _hidden_token_ids(tokenizer, request.tool_call_format, request.thoughts)
        self._detokenizer = IncrementalDetokenizer(tokenizer, request.prompt_token_ids, hidden)
        self._stops = StopStrings(request.stop)
        self._hidden_token_ids = request.stop_token_ids
        self._min_tokens = request.sampling.min_tokens
        self._lists_hidden = request.lists_stop_token
        self.completion_tokens = 0
        """Tokens sampled so far: stop tokens count, and so do all tokens that a stop string lies in."""
        self._relayed_ahead = 0
        """Characters that the client has of text still to be released."""

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the output."""
        return self._stops.found

    def resume(self, token_ids: Sequence[int], relayed_characters: int | None) -> Piece:
        """Accept ids generated before; returns the part of their text that the client lacks, and how many of the ids
        count.

        `relayed_characters` is how much of the output's text the client has; None: the text that was released after
        these ids.
        """
        piece = self.push(token_ids)
        if relayed_characters is None:
            return replace(piece, text="")
        self._relayed_ahead = max(0, relayed_characters - len(piece.text))
        return replace(piece, text=piece.text[relayed_characters:])

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> Piece:
        """Take sampled tokens, up to the one that completes a stop string; ids after it are dropped."""
        texts: list[str] = []
        listed: list[ListedToken] = []
        for count, index in enumerate(token_ids, start=1):
            self.completion_tokens += 1
            is_hidden = index in self._hidden_token_ids
            if logprobs and (self._lists_hidden or not is_hidden):
                listed.append((index, logprobs[count - 1]))
            if is_hidden:
                continue
            text = self._detokenizer.push((index,))
            # No stop string ends an output that is still too short, nor begins there.
            match = self._stops.push(text) if self.completion_tokens > self._min_tokens else StopMatch(text, False)
            texts.append(match.text)
            if match.matched:
                return Piece(self._unseen("".join(texts)), tuple(token_ids[:count]), True, tuple(listed))
        return Piece(self._unseen("".join(texts)), tuple(token_ids), False, tuple(listed))

    def finish(self) -> Piece:
        """No more tokens follow: releases the held-back text, unless that completes a stop string."""
        match = self._stops.push(self._detokenizer.flush())
        if match.matched:
            return Piece(self._unseen(match.text), (), True)
        return Piece(self._unseen(match.text + self._stops.flush()), (), False)

    def _unseen(self, text: str) -> str:
        """What of newly released text the client doesn't have yet."""
        unseen = text[self._relayed_ahead :]
        self._relayed_ahead -= len(text) - len(unseen)
        return unseen


def _hidden_token_ids(
    tokenizer: EngineTokenizer, form: ToolCallFormat | None, thoughts: ThoughtStart | None
) -> frozenset[int]:
    """Ids that are hidden in an answer with tool calls in the format `form` and, possibly, reasoning as in `thoughts`.

    Tags are shown even as control tokens, since the answer's reader looks for them. A mark before a whole answer of
    tool calls is hidden even as a plain token, since its reader parses the text after it.
    """
    shown = (_CALL_TAGS if form is ToolCallFormat.TAGGED else ()) + (() if thoughts is None else (OPENING, CLOSING))
    marks = () if form is None else _CALL_MARKS.get(form, ())
    return tokenizer.hidden_ids(shown, marks) if shown or marks else tokenizer.special_token_ids


@dataclass(frozen=True, slots=True)
class OutputStart:
    """A request's output before its first new token."""

    output: OutputText
    prompt: ToldPrompt | None = None
    """The prompt data that the answer reports; None: none."""
    logprobs: PackedLogprobs | None = None
    """Where those of its new tokens wait; None: the request wants none."""
    text: str = ""
    """The part of the earlier ids' text that the client lacks."""
    ended: FinishReason | None = None
    """Set if no ids follow those generated before."""


def start_output(tokenizer: EngineTokenizer, request: AdmittedRequest, relayed_characters: int | None) -> OutputStart:
    """The request's output, advanced to the end of `generated_token_ids`.

    Raises:
        PromptError: the ids continue after a stop string, or characters were relayed of no ids.
    """
    output = OutputText(tokenizer, request)
    prompt = None if request.prompt_told is None else ToldPrompt(tokenizer.token_bytes, request)
    logprobs = None if request.sampling.num_top_logprobs is None else PackedLogprobs(tokenizer.token_bytes)
    generated = request.generated_token_ids
    if not generated:
        if relayed_characters:
            message = f"generated_characters is {relayed_characters}, but there are no generated_token_ids."
            raise PromptError(ErrorCode.INVALID_VALUE, message, param="generated_characters")
        return OutputStart(output, prompt, logprobs)
    piece = output.resume(generated, relayed_characters)
    if len(piece.token_ids) < len(generated):
        message = f"generated_token_ids go on after the stop string that ends at the {len(piece.token_ids)}th of them."
        raise PromptError(ErrorCode.INVALID_VALUE, message, param="generated_token_ids")
    return OutputStart(output, prompt, logprobs, piece.text, _ended(request, stopped=piece.stopped))


def _ended(request: AdmittedRequest, *, stopped: bool) -> FinishReason | None:
    generated = request.generated_token_ids
    if stopped or generated[-1] in request.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(generated) >= request.max_new_tokens else None
