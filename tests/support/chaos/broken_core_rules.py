"""The engine's core with one rule broken, as `broken_rules` does it for what lies below the core."""

from collections.abc import Callable

import pytest

from stageline_api.engine_http import FinishReason
from stageline_runtime.engine.answer_streams import AnswerStreams
from stageline_runtime.engine.core import EngineCore
from stageline_runtime.engine.scheduling.scheduler import NewToken

Patch = pytest.MonkeyPatch


def leave_an_aborted_stream_open(patch: Patch) -> None:
    def abort_in_silence(self: EngineCore, request_id: str, _reason: FinishReason = FinishReason.ABORT) -> None:
        self._live_scheduler.abort(request_id)
        self._want_pump()

    patch.setattr(EngineCore, "abort", abort_in_silence)


def forget_to_pump_for_a_new_request(patch: Patch) -> None:
    patch.setattr(EngineCore, "_want_pump", lambda _self: None)


def deliver_a_token_twice(patch: Patch) -> None:
    deliver = AnswerStreams.deliver

    def deliver_twice(self: AnswerStreams, token: NewToken) -> None:
        deliver(self, token)
        deliver(self, token)

    patch.setattr(AnswerStreams, "deliver", deliver_twice)


def end_every_stream_by_length(patch: Patch) -> None:
    deliver = AnswerStreams.deliver

    def deliver_unstopped(self: AnswerStreams, token: NewToken) -> None:
        deliver(self, NewToken(token.request_id, token.token, token.finished, stopped=False))

    patch.setattr(AnswerStreams, "deliver", deliver_unstopped)


BROKEN_CORE_RULES: list[Callable[[Patch], None]] = [
    leave_an_aborted_stream_open,
    forget_to_pump_for_a_new_request,
    deliver_a_token_twice,
    end_every_stream_by_length,
]
