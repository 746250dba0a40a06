"""What it costs to follow guided answers, the engine's event loop pays in small pieces, and vLLM's steps never wait."""

import asyncio
import itertools
import time
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from tokenizers import pre_tokenizers

from oracles.tiny_models import EOS_TOKEN_ID, SPECIAL_TOKENS, VOCAB_SIZE
from processes.core_answers import answer_of
from processes.cpu_bounds import CpuBound
from processes.fake_vllm.tokens import COMPILES_FOR
from processes.vllm_stand_in import StandIn, stand_in, write_model
from stageline_api.engine_http import GRAMMAR_MARK, REGEX_MARK, FinishReason
from stageline_runtime.engine.core_api import AdmittedRequest, CoreEvent, EndEvent, FailEvent
from stageline_runtime.guided.grammar_walk import TOO_SLOW, GrammarWalk, WalkMaker
from stageline_runtime.guided.json_grammars import MAX_KEPT, JsonGrammars
from stageline_runtime.guided.rehearsal import rehearse
from stageline_runtime.plan_bus.messages import RequestSampling
from stageline_vllm.engine import generation
from stageline_vllm.engine.answer_progress import LOST_IN_WORKER, AnswerProgress
from stageline_vllm.engine.generate_words import Choice, StreamEvent
from stageline_vllm.engine.grammar_words import MOST_TOKENS, WorkersGrammars, grammar_body, is_compiled
from stageline_vllm.request_draws import read_draws

GAP_SECONDS: Final = 0.25
"""For which nobody's tokens may pause because of another's request."""
AMBIGUOUS: Final = GRAMMAR_MARK + 'start: /[a-z]+/ "~" s\ns: s s | s s s | /[a-z]/ | ""\n'
"""What each letter costs behind the first word grows with the square of how many there are."""
WORDS_OF_WORDS: Final = (
    GRAMMAR_MARK
    + 'start: /[a-z]+/ "~" s*\ns: '
    + " | ".join(f"w{at}" for at in range(200))
    + "\n"
    + "".join(f"w{at}: /[a-z]{{1,{at + 1}}}/ s?\n" for at in range(200))
)
"""Its tokens cost more than its masks."""
NUMBERS: Final = REGEX_MARK + "[0-9]{4}"
PROMPT: Final = (5, 9, 33)
_names = itertools.count()


def token_of(letter: str) -> int:
    return len(SPECIAL_TOKENS) + sorted(pre_tokenizers.ByteLevel.alphabet()).index(letter)


def request(schema: str, generated: str = "") -> AdmittedRequest:
    sampling = RequestSampling(temperature=1.0, seed=1, json_schema=schema, num_prompt_tokens=len(PROMPT))
    return AdmittedRequest(
        request_id=f"r{next(_names)}",
        prompt_token_ids=PROMPT,
        sampling=sampling,
        max_new_tokens=len(generated) + 8,
        stop_token_ids=frozenset({EOS_TOKEN_ID}),
        generated_token_ids=tuple(map(token_of, generated)),
    )


def answers(vllm: StandIn, *requests: AdmittedRequest) -> tuple[list[list[CoreEvent]], float]:
    """Their events, and the most CPU time that this process used between two turns of its event loop."""

    async def beat() -> None:
        last = time.process_time()
        while True:
            await asyncio.sleep(0.001)
            gaps.append(time.process_time() - last)
            last = time.process_time()

    async def run() -> list[list[CoreEvent]]:
        core = vllm.core(max_running=len(requests))
        beating = asyncio.create_task(beat())
        try:
            await core.warm_up()
            gaps.clear()
            return await asyncio.gather(*(answer_of(core, each) for each in requests))
        finally:
            beating.cancel()
            await core.close()

    gaps: list[float] = []
    return asyncio.run(run()), max(gaps, default=0.0)


def walks_of(directory: Path) -> WalkMaker[GrammarWalk]:
    grammars = JsonGrammars(write_model(directory), VOCAB_SIZE, [EOS_TOKEN_ID])
    grammars.load()
    return WalkMaker(grammars, GrammarWalk)


def event(*token_ids: int) -> StreamEvent:
    return StreamEvent((Choice(token_ids),))


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with stand_in(tmp_path_factory.mktemp("vllm")) as one:
        yield one


@pytest.mark.parametrize("text", [AMBIGUOUS, WORDS_OF_WORDS], ids=["ambiguous", "words of words"])
def test_no_rehearsal_comes_to_where_these_are_dear(tmp_path: Path, text: str) -> None:
    """Which is why answers have a limit."""
    grammars = JsonGrammars(write_model(tmp_path), VOCAB_SIZE, [EOS_TOKEN_ID])
    assert rehearse(lambda: grammars.matcher(text), VOCAB_SIZE, [EOS_TOKEN_ID]) is None


def test_answers_that_come_back_with_much_to_follow_end_and_the_event_loop_goes_on(
    vllm: StandIn, cpu_bound: CpuBound
) -> None:
    ended, longest = answers(vllm, *(request(AMBIGUOUS, "a~" + "b" * 240) for _ in range(8)), request(NUMBERS, "12"))
    for (failed,) in ended[:-1]:
        assert isinstance(failed, FailEvent)
        assert failed.is_final
        assert TOO_SLOW in failed.message
    assert ended[-1][-1] == EndEvent(FinishReason.STOP), "another's goes on"
    assert cpu_bound.holds(longest, GAP_SECONDS), f"{longest:.3f} s of CPU between two turns"


def test_many_answers_whose_tokens_are_dear_take_no_more_of_a_turn_than_a_gap_may_last(
    tmp_path: Path, cpu_bound: CpuBound
) -> None:
    walks = walks_of(tmp_path)
    progress = [AnswerProgress(request(WORDS_OF_WORDS), walks.start(WORDS_OF_WORDS)) for _ in range(16)]
    slowest, failures = 0.0, []
    for token in map(token_of, "a~bcd"):
        began = time.thread_time() + walks.calls.cpu_seconds
        for one in progress:
            if one.end() is None:
                one.take(event(token))
        slowest = max(slowest, time.thread_time() + walks.calls.cpu_seconds - began)
    failures = [last.failure if (last := one.end()) is not None else None for one in progress]
    assert failures == [TOO_SLOW] * len(progress)
    assert cpu_bound.holds(slowest, GAP_SECONDS), f"{slowest:.3f} s of CPU for a token of each"
    walks.close()


def test_what_the_worker_says_where_it_lost_the_grammar_is_a_failure_where_an_end_may_be_too(tmp_path: Path) -> None:
    walks = walks_of(tmp_path)
    foreign = walks.grammars.foreign_token
    assert foreign is not None
    progress = AnswerProgress(request(REGEX_MARK + "[a-z]*"), walks.start(REGEX_MARK + "[a-z]*"), foreign)
    assert [new.token for new in progress.take(event(token_of("a"), foreign))] == [token_of("a")]
    last = progress.end()
    assert last is not None
    assert last.failure == LOST_IN_WORKER
    walks.close()


def test_a_guided_answer_is_asked_for_once_vllms_worker_has_its_grammar(tmp_path: Path) -> None:
    """The stand-in breaks down where a step has to wait for a compiler."""
    with stand_in(tmp_path, environment={COMPILES_FOR: str(2 * MOST_TOKENS + 3)}) as vllm:
        ended, _ = answers(vllm, *(request(REGEX_MARK + f"[0-9]{{{count}}}") for count in (2, 3, 4)))
        assert [each[-1] for each in ended] == [EndEvent(FinishReason.STOP)] * 3


def test_others_have_vllms_places_while_grammars_are_compiled(tmp_path: Path) -> None:
    plain = AdmittedRequest(
        request_id="plain",
        prompt_token_ids=PROMPT,
        sampling=RequestSampling(num_prompt_tokens=len(PROMPT)),
        max_new_tokens=4,
        stop_token_ids=frozenset(),
    )

    async def run(vllm: StandIn) -> tuple[list[CoreEvent], int]:
        core = vllm.core(max_running=2)
        try:
            for count in (2, 3):
                core.submit(request(REGEX_MARK + f"[0-9]{{{count}}}"), lambda _: None)
            return await answer_of(core, plain), core.load().waiting
        finally:
            await core.close()

    with stand_in(tmp_path, environment={COMPILES_FOR: str(10**9)}) as vllm:
        events, waiting = asyncio.run(run(vllm))
    assert events[-1] == EndEvent(FinishReason.LENGTH)
    assert waiting == 1, "of the two with grammars one keeps a place"


def test_a_grammar_that_is_not_compiled_in_time_ends_its_answer_here_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "GRAMMAR_LIMIT_SECONDS", 0.5)
    with stand_in(tmp_path, environment={COMPILES_FOR: str(10**9)}) as vllm:
        [[failed]], _ = answers(vllm, request(NUMBERS))
    assert failed == FailEvent("Its grammar was not compiled within 0.5 s.", is_final=True), "the group is well"


def test_what_is_asked_for_a_grammar_is_of_its_request_and_ends_by_a_stop() -> None:
    asked = request(NUMBERS)
    body = msgspec.json.decode(grammar_body(asked, 7, {EOS_TOKEN_ID}))
    draws = read_draws(body["sampling_params"]["extra_args"])
    assert draws is not None
    assert (draws.number, draws.sampling, draws.awaits_grammar) == (7, asked.sampling, True)
    assert body["sampling_params"]["stop_token_ids"] == [EOS_TOKEN_ID]
    assert not is_compiled([b'{"choices": [{"token_ids": [0, 0], "finish_reason": "length"}]}'])
    assert is_compiled([b'{"choices": [{"token_ids": [0, 2], "finish_reason": "stop"}]}'])


def test_a_worker_surely_has_a_grammar_until_it_may_have_used_as_many_others_as_it_keeps() -> None:
    workers, running = WorkersGrammars(max_running=16), 2 * 16
    first = workers.begin()
    assert not workers.surely_has("first"), "it has begun, and may never come there"
    workers.used("first", first)
    for _ in range(MAX_KEPT - running):
        assert workers.surely_has("first")
        workers.begin()
    assert workers.surely_has("first")
    workers.begin()
    assert not workers.surely_has("first")
    workers.used("first", workers.begin())
    workers.used("first", first)
    assert workers.surely_has("first"), "one that ends late says nothing new"


def test_a_worker_that_runs_more_at_once_than_it_keeps_surely_has_none() -> None:
    workers = WorkersGrammars(max_running=MAX_KEPT)
    assert workers.is_new("one")
    workers.used("one", workers.begin())
    assert not workers.surely_has("one")
    assert not workers.is_new("one"), "it is asked about, and behind no others' compilers"
