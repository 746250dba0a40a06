"""An engine's lines as events: what came together is one piece, and nothing else changes."""

import asyncio
import json
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline_api.engine_http import (
    Admitted,
    Delta,
    Event,
    Failed,
    Finished,
    FinishReason,
    ThoughtStart,
    TokenLogprob,
    ToolCallFormat,
)
from stageline_gateway.engine_client.event_reader import EventReader
from stageline_gateway.engine_client.incoming_lines import IncomingLines
from stageline_gateway.engine_client.run_events import EngineEvent, EngineLostError, LossKind

ADMITTED = Admitted(prompt_tokens=1)
END = Finished(reason=FinishReason.STOP, prompt_tokens=1, completion_tokens=3)
LOGPROB = TokenLogprob(token_id=1, bytes=(97,), logprob=-0.5, top_logprobs=())

PIECES = st.builds(Delta, text=st.text(max_size=5), token_ids=st.lists(st.integers(0, 2**31), max_size=3).map(tuple))
READS = st.lists(st.lists(PIECES, max_size=4), max_size=4)


def lines(*events: Event) -> list[bytes]:
    return [event.to_json() for event in events]


class Source(IncomingLines):
    """Nothing but what the test brings."""

    def _hold(self) -> None:
        pass

    def _go_on(self) -> None:
        pass


def read(*reads: Sequence[bytes]) -> list[list[EngineEvent]]:
    """What is made of the lines of each read, until the end of the answer; raises its failure."""
    return asyncio.run(_read(reads))[0]


def failed(*reads: Sequence[bytes]) -> tuple[list[list[EngineEvent]], Exception | None]:
    """The same, and the failure."""
    return asyncio.run(_read(reads, fails=True))


async def _read(
    reads: Sequence[Sequence[bytes]], *, fails: bool = False
) -> tuple[list[list[EngineEvent]], Exception | None]:
    source, taken = Source(), list[list[EngineEvent]]()
    reader = EventReader(lambda events: taken.append(list(events)), 120.0, 30.0)
    reading = asyncio.create_task(reader.read_all(source))
    for lines in reads:
        await asyncio.sleep(0)
        source.bring(lines, asyncio.get_running_loop().time())
    await asyncio.sleep(0)
    reading.cancel()
    [failure] = await asyncio.gather(reading, return_exceptions=True)
    if isinstance(failure, Exception) and not fails:
        raise failure
    return taken, failure if isinstance(failure, Exception) else None


@given(READS)
def test_of_one_read_there_is_one_piece_with_all_text_and_tokens(reads: list[list[Delta]]) -> None:
    told = [pieces for pieces in reads if pieces]
    admitted, *found = read(lines(ADMITTED), *(lines(*pieces) for pieces in told))
    assert admitted == [ADMITTED]
    assert found == [
        [
            Delta(
                text="".join(piece.text for piece in pieces),
                token_ids=tuple(token for piece in pieces for token in piece.token_ids),
            )
        ]
        for pieces in told
    ]


def test_other_events_keep_their_place_and_nothing_follows_the_end() -> None:
    a, b, c = (Delta(text=text, token_ids=(index,)) for index, text in enumerate("abc"))
    assert read(lines(ADMITTED, a, b, END, c)) == [[ADMITTED, Delta(text="ab", token_ids=(0, 1)), END]]


@pytest.mark.parametrize(
    "admitted",
    [
        Admitted(prompt_tokens=1, thoughts=ThoughtStart.TAGGED),
        Admitted(prompt_tokens=1, tool_call_format=ToolCallFormat.TAGGED),
    ],
    ids=["thoughts", "calls"],
)
def test_where_more_than_text_is_looked_for_every_piece_stays(admitted: Admitted) -> None:
    said: list[Event] = [admitted, Delta(text="a", token_ids=(1,)), Delta(text="b", token_ids=(2,)), END]
    assert read(lines(*said)) == [said]


def test_fields_that_this_version_does_not_know_are_ignored() -> None:
    said: list[Event] = [ADMITTED, Delta(text="a", token_ids=(1,), logprobs=(LOGPROB,)), END]
    newer = [json.dumps(msgspec.to_builtins(event) | {"more": {"than": [1]}}).encode() for event in said]
    assert read(newer) == [said]


def test_fields_at_their_defaults_may_be_given() -> None:
    line = b'{"type":"admitted","prompt_tokens":3,"thoughts":null,"tool_call_format":null,"ignored":[]}'
    assert read([line]) == [[Admitted(prompt_tokens=3)]]


def test_log_probabilities_stay_with_their_piece() -> None:
    told = Delta(text="b", token_ids=(2,), logprobs=(LOGPROB,))
    said: list[Event] = [ADMITTED, Delta(text="a", token_ids=(1,)), told, Delta(text="c", token_ids=(3,)), END]
    assert read(lines(*said)) == [said]


@pytest.mark.parametrize(
    "wrong",
    [
        b"nonsense",
        b'{"type":"admitted"}',
        b'{"type":"delta","text":"x","token_ids":[1.5]}',
        b'{"type":"delta","text":"x"}',
        json.dumps({"type": "delta", "text": "x", "token_ids": [], "logprobs": [{}]}).encode(),
        b'{"type":"unheard of"}',
        b'{"type":"delta","text":"\xff","token_ids":[]}',
        b'{"type":"delta","text":"","token_ids":[],"logprobs":' + b"[" * 5000,
        *lines(ADMITTED),
    ],
)
def test_a_line_that_is_no_event_in_order_fails_behind_those_before_it(wrong: bytes) -> None:
    a = Delta(text="a", token_ids=(1,))
    taken, failure = failed([*lines(ADMITTED, a), wrong, *lines(a)])
    assert taken == [[ADMITTED, a]]
    assert isinstance(failure, EngineLostError)
    assert failure.kind is LossKind.PROTOCOL


@pytest.mark.parametrize("first", [Delta(text="a", token_ids=(1,)), END])
def test_nothing_comes_before_the_admission(first: Event) -> None:
    taken, failure = failed(lines(first))
    assert (taken, isinstance(failure, EngineLostError)) == ([], True)


def test_an_engine_s_failure_is_told_behind_what_came_before_it() -> None:
    a = Delta(text="a", token_ids=(1,))
    taken, failure = failed(lines(ADMITTED, a, Failed(message="m", is_suspect=True)))
    assert taken == [[ADMITTED, a]]
    assert isinstance(failure, EngineLostError)
    assert failure.kind is LossKind.HUNG
