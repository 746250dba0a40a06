"""Lines of answers are what the types of the interface write, however they are written and however long they wait."""

import gc
import itertools
import math
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from oracles.tokenizer_models import write_byte_level
from processes.scripted_core_server import EOS_TOKEN_ID, VOCAB_SIZE, ScriptedCore, ids_of, says_nothing
from stageline_api.engine_http import Delta, Failed, FinishReason, TokenLogprob, TopLogprob
from stageline_runtime.engine.core_api import AdmittedRequest, EndEvent, TokenEvent
from stageline_runtime.engine.edge.answer_lines import MOST_LOGPROBS, AnswerLines, delta_json
from stageline_runtime.engine.text.output_text import start_output
from stageline_runtime.engine.text.tokenizer import EngineTokenizer
from stageline_runtime.plan_bus.messages import RequestSampling, TokenLogprobs

TEXTS = st.text(st.characters(codec="utf-8")) | st.text(st.characters(max_codepoint=0x9F))
VALUES = st.floats(-100, 0) | st.floats(-1e-5, 0)
BYTES = st.lists(st.integers(0, 255), max_size=4).map(tuple)
TOP = st.builds(TopLogprob, token_id=st.integers(0, 2**31), bytes=BYTES, logprob=VALUES)
LOGPROBS = st.lists(
    st.builds(
        TokenLogprob,
        token_id=st.integers(0, 2**31),
        bytes=BYTES,
        logprob=VALUES,
        top_logprobs=st.lists(TOP, max_size=3).map(tuple),
    ),
    max_size=3,
)
IDS = st.integers(EOS_TOKEN_ID + 1, VOCAB_SIZE - 1)
SAMPLED = st.tuples(IDS, st.builds(TokenLogprobs, VALUES, st.lists(st.tuples(IDS, VALUES), max_size=3).map(tuple)))
TAKE = None
"""Whoever writes takes a line, if there is one."""


@given(TEXTS, st.lists(st.integers(0, 2**31)), LOGPROBS)
def test_a_delta_is_written_as_its_type_writes_it(text: str, ids: list[int], logprobs: list[TokenLogprob]) -> None:
    delta = Delta(text=text, token_ids=tuple(ids), logprobs=tuple(logprobs))
    line = delta_json(text, ids, [structs.asdict(one) for one in logprobs])
    assert line == delta.to_json()
    assert Delta.from_json(line) == delta
    assert b"\n" not in line


@pytest.mark.parametrize("value", [-math.inf, math.nan])
def test_what_json_has_no_number_for_is_written_as_its_type_writes_it(value: float) -> None:
    one = TokenLogprob(token_id=5, bytes=(1,), logprob=value, top_logprobs=())
    line = delta_json("", [5], [structs.asdict(one)])
    assert line == Delta(text="", token_ids=(5,), logprobs=(one,)).to_json()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> EngineTokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_byte_level(directory)
    return EngineTokenizer.load(directory)


def admitted(
    *, stop: tuple[str, ...] = (), lists_stop_token: bool = False, generated: tuple[int, ...] = ()
) -> AdmittedRequest:
    return AdmittedRequest(
        request_id="r1",
        prompt_token_ids=ids_of("hello"),
        sampling=RequestSampling(num_top_logprobs=20),
        max_new_tokens=1_000_000,
        stop_token_ids=frozenset({EOS_TOKEN_ID}),
        stop=stop,
        lists_stop_token=lists_stop_token,
        generated_token_ids=generated,
    )


def answer_to(request: AdmittedRequest, tokenizer: EngineTokenizer) -> AnswerLines:
    """Its answer, of which the first line has been taken."""
    start = start_output(tokenizer, request, None)
    answer = AnswerLines(ScriptedCore(says_nothing), start, request, wake=lambda: None, on_close=lambda: None)
    answer.next_line()
    return answer


def waiting_lines(answer: AnswerLines) -> list[bytes]:
    lines = []
    while answer.has_waiting:
        lines.append(answer.next_line())
    return lines


def typed(lines: list[bytes]) -> list[Delta]:
    return [Delta.from_json(line) for line in lines if b'"type":"delta"' in line[:20]]


def listed_in(lines: list[bytes]) -> list[TokenLogprob]:
    return [one for delta in typed(lines) for one in delta.logprobs]


def one_each(token_ids: tuple[int, ...]) -> TokenEvent:
    """Values that differ from token to token."""
    logprobs = (TokenLogprobs(-1.0 - at / 3, ((index, -1.0 - at / 3), (9, -7.5))) for at, index in enumerate(token_ids))
    return TokenEvent(token_ids, tuple(logprobs))


def described(index: int, logprobs: TokenLogprobs, tokenizer: EngineTokenizer) -> TokenLogprob:
    bytes_of = tokenizer.token_bytes.of
    top = tuple(TopLogprob(token_id=one, bytes=tuple(bytes_of(one)), logprob=value) for one, value in logprobs.top)
    return TokenLogprob(token_id=index, bytes=tuple(bytes_of(index)), logprob=logprobs.logprob, top_logprobs=top)


@settings(deadline=None)
@given(st.lists(st.just(TAKE) | st.lists(SAMPLED, min_size=1, max_size=4), max_size=12))
def test_log_probabilities_that_waited_are_written_as_their_types_write_them(
    tokenizer: EngineTokenizer, steps: list[list[tuple[int, TokenLogprobs]] | None]
) -> None:
    answer, lines, all_sampled = answer_to(admitted(), tokenizer), [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stageline_runtime.engine.edge.answer_lines.MOST_LOGPROBS", 3)
        for sampled in steps:
            if sampled is not TAKE:
                all_sampled += sampled
                answer.take(TokenEvent(tuple(one for one, _ in sampled), tuple(of for _, of in sampled)))
            elif answer.has_waiting:
                lines.append(answer.next_line())
        lines += waiting_lines(answer)
    deltas = typed(lines)
    assert lines == [delta.to_json() for delta in deltas]
    assert listed_in(lines) == [described(index, logprobs, tokenizer) for index, logprobs in all_sampled]
    for delta in deltas:
        assert list(delta.token_ids) == [one.token_id for one in delta.logprobs]
        assert len(delta.logprobs) <= 3


@settings(deadline=None)
@given(st.lists(st.just(TAKE) | st.text("ab\x01é😀", min_size=1, max_size=40), max_size=12), st.booleans())
def test_whoever_stops_reading_between_lines_has_the_ids_of_all_its_text(
    tokenizer: EngineTokenizer, steps: list[str | None], with_logprobs: bool
) -> None:
    """Also within what came at once and is too much for a line."""
    answer, lines = answer_to(admitted(), tokenizer), list[bytes]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stageline_runtime.engine.edge.answer_lines.MOST_DELTA_BYTES", 70)
        for step in steps:
            if step is not TAKE:
                answer.take(one_each(ids_of(step)) if with_logprobs else TokenEvent(ids_of(step)))
            elif answer.has_waiting:
                lines.append(answer.next_line())
        lines += waiting_lines(answer)
    text, ids = "", list[int]()
    for delta in typed(lines):
        text += delta.text
        ids += delta.token_ids
        assert tokenizer.decode(ids).startswith(text)
        plain = structs.replace(delta, logprobs=()).to_json()
        assert len(plain) <= 70 + len(Delta(text="", token_ids=()).to_json())
        assert [one.token_id for one in delta.logprobs] == (list(delta.token_ids) if with_logprobs else [])
    whole = "".join(step for step in steps if step is not TAKE)
    assert (text, tuple(ids)) == (whole, ids_of(whole))


def test_a_long_wait_is_split_in_order_and_its_text_comes_last(tokenizer: EngineTokenizer) -> None:
    answer = answer_to(admitted(), tokenizer)
    ids = tuple(itertools.islice(itertools.cycle(ids_of("abcdefg")), 2 * MOST_LOGPROBS + 1))
    for start in range(0, len(ids), 5):
        answer.take(one_each(ids[start : start + 5]))
    deltas = typed(waiting_lines(answer))
    assert [len(delta.logprobs) for delta in deltas] == [MOST_LOGPROBS, MOST_LOGPROBS, 1]
    assert [len(delta.text) for delta in deltas] == [0, 0, len(ids)]
    assert sum((delta.token_ids for delta in deltas), ()) == ids
    assert [one.token_id for delta in deltas for one in delta.logprobs] == list(ids)


def test_what_a_reader_that_lags_lets_wait_is_small(tokenizer: EngineTokenizer) -> None:
    """Nothing holds the group back meanwhile; as objects these were 48 MB."""
    answer = answer_to(admitted(), tokenizer)
    gc.collect()
    tracemalloc.start()
    try:
        for at in range(4000):
            top = tuple((4 + (at + rank) % 256, -1.0 - at / 7 - rank) for rank in range(20))
            answer.take(TokenEvent((top[0][0],), (TokenLogprobs(top[0][1], top),)))
        _, most_bytes = tracemalloc.get_traced_memory()
        told = sum(line.count(b'"top_logprobs"') for line in waiting_lines(answer))
        gc.collect()
        left_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert told == 4000
    assert most_bytes < 2_000_000
    assert left_bytes < 200_000, "what was written is still held"


@pytest.mark.parametrize("lists", [True, False])
@pytest.mark.parametrize("generated", ["", "x"])
def test_what_is_listed_begins_after_what_was_generated_before_and_ends_with_the_output(
    tokenizer: EngineTokenizer, generated: str, lists: bool
) -> None:
    request = admitted(stop=("END",), lists_stop_token=lists, generated=ids_of(generated))
    stopped_by_string = answer_to(request, tokenizer)
    stopped_by_string.take(one_each(ids_of("aEND and more")))
    assert [one.token_id for one in listed_in(waiting_lines(stopped_by_string))] == list(ids_of("aEND"))

    stopped_by_token = answer_to(request, tokenizer)
    stopped_by_token.take(one_each((*ids_of("aEN"), EOS_TOKEN_ID)))
    stopped_by_token.take(EndEvent(FinishReason.STOP))
    listed = [one.token_id for one in listed_in(waiting_lines(stopped_by_token))]
    assert listed == [*ids_of("aEN"), *([EOS_TOKEN_ID] if lists else [])]


def test_an_id_that_is_none_ends_the_answer_after_what_came_before(tokenizer: EngineTokenizer) -> None:
    answer = answer_to(admitted(), tokenizer)
    answer.take(one_each(ids_of("ab")))
    answer.take(TokenEvent(ids_of("c"), (TokenLogprobs(-1.0, ((2**40, -1.0),)),)))
    *lines, last = waiting_lines(answer)
    assert "its log says why" in Failed.from_json(last).message
    assert [(delta.text, len(delta.logprobs)) for delta in typed(lines)] == [("ab", 2)]
