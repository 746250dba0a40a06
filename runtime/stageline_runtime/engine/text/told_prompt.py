"""A prompt's tokens as an answer reports them: each once and in order, with log probabilities if requested.

They stay packed, as the last stage sent them, and become objects one piece at a time when they are written: with
twenty alternatives a token, objects take a hundred times as much. Pure.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from stageline_api.engine_http import PromptToken, PromptTokens, TopLogprob
from stageline_runtime.engine.core_api import AdmittedRequest
from stageline_runtime.engine.text.token_bytes import TokenBytes
from stageline_runtime.plan_bus.prompt_report import PromptReport, unpacked

PIECE_ENTRIES: Final = 1024
"""Tokens and alternatives in one piece: a few milliseconds' work."""


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """Consecutive tokens of the prompt; `report` has their log probabilities, from its token `offset` on."""

    first: int
    count: int
    report: PromptReport | None = None
    offset: int = 0


class ToldPrompt:
    def __init__(self, token_bytes: TokenBytes, request: AdmittedRequest) -> None:
        self._token_bytes = token_bytes
        self._request = request
        self._has_logprobs = request.sampling.num_top_prompt_logprobs is not None

    def begun(self) -> Iterator[PromptPiece]:
        """The pieces known before any computation: all, or only the first token if log probabilities are requested."""
        end = 1 if self._has_logprobs else len(self._request.prompt_token_ids)
        return _pieces(self._request.prompt_told or 0, end)

    def reported(self, report: PromptReport) -> Iterator[PromptPiece]:
        """What a report adds."""
        return _pieces(report.position, report.position + report.num_tokens, report)

    def written(self, piece: PromptPiece) -> PromptTokens:
        ids = self._request.prompt_token_ids[piece.first : piece.first + piece.count]
        if piece.report is None:
            return PromptTokens(tokens=tuple(self._token(index) for index in ids))
        known = unpacked(piece.report, piece.offset, piece.offset + piece.count)
        return PromptTokens(
            tokens=tuple(
                self._token(index, one.logprob, one.rank, one.top) for index, one in zip(ids, known, strict=True)
            )
        )

    def _token(
        self,
        index: int,
        logprob: float | None = None,
        rank: int | None = None,
        top: tuple[tuple[int, float], ...] = (),
    ) -> PromptToken:
        bytes_of = self._token_bytes.numbers
        listed = tuple(TopLogprob(token_id=other, bytes=bytes_of(other), logprob=value) for other, value in top)
        return PromptToken(token_id=index, bytes=bytes_of(index), logprob=logprob, rank=rank, top_logprobs=listed)


def _pieces(first: int, end: int, report: PromptReport | None = None) -> Iterator[PromptPiece]:
    most = PIECE_ENTRIES // (1 + (0 if report is None else report.top_count))
    for start in range(first, end, most):
        yield PromptPiece(start, min(most, end - start), report, start - first)
