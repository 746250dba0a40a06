"""Where an answer goes on that another engine began: which ids count as its output, and whether they end it. Pure.

The border between prompt and output is kept: the ids are output to everything that counts output. Their text is made
again by a detokenizer of this engine, one id at a time, so held-back text (half a character, a possible stop string)
stands exactly where it stood, and only what the client lacks is sent.
"""

from dataclasses import dataclass

from stageline_api.engine_http import ErrorCode, FinishReason
from stageline_runtime.engine.core_api import AdmittedRequest
from stageline_runtime.engine.errors import PromptError
from stageline_runtime.engine.text.output_text import OutputText
from stageline_runtime.engine.text.tokenizer import EngineTokenizer

PARAM = "generated_token_ids"


@dataclass(frozen=True, slots=True)
class OutputStart:
    """A request's output before its first new token."""

    output: OutputText
    text: str = ""
    """Of the ids generated before, what the client lacks."""
    ended: FinishReason | None = None
    """The ids generated before are all there will be."""


def check_generated(request: AdmittedRequest) -> None:
    """Refuse output that can't have come from this request.

    Raises:
        PromptError: naming `generated_token_ids`: more of them than the answer may have, or one follows a stop token.
    """
    generated = request.generated_token_ids
    if len(generated) > request.max_new_tokens:
        message = (
            f"{len(generated)} generated_token_ids are more than this answer may have: max_tokens, or what the "
            f"context leaves, is {request.max_new_tokens}."
        )
        raise PromptError(ErrorCode.INVALID_VALUE, message, param=PARAM)
    for index in generated[:-1]:
        if index in request.stop_token_ids:
            message = f"generated_token_ids go on after {index}, which ends the answer."
            raise PromptError(ErrorCode.INVALID_VALUE, message, param=PARAM)


def start_output(tokenizer: EngineTokenizer, request: AdmittedRequest, relayed_characters: int | None) -> OutputStart:
    """The request's output, brought to where `generated_token_ids` left it.

    Raises:
        PromptError: the ids go on after a stop string, or characters were relayed of no ids.
    """
    output = OutputText(tokenizer, request)
    generated = request.generated_token_ids
    if not generated:
        if relayed_characters:
            message = f"generated_characters is {relayed_characters}, but there are no generated_token_ids."
            raise PromptError(ErrorCode.INVALID_VALUE, message, param="generated_characters")
        return OutputStart(output)
    piece = output.resume(generated, relayed_characters)
    if len(piece.token_ids) < len(generated):
        message = f"generated_token_ids go on after the stop string that ends at the {len(piece.token_ids)}th of them."
        raise PromptError(ErrorCode.INVALID_VALUE, message, param=PARAM)
    return OutputStart(output, piece.text, _ended(request, stopped=piece.stopped))


def _ended(request: AdmittedRequest, *, stopped: bool) -> FinishReason | None:
    generated = request.generated_token_ids
    if stopped or generated[-1] in request.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(generated) >= request.max_new_tokens else None
