"""The engine's core over vLLM's HTTP server: answers end where they should, wait their turn, and go on exactly."""

import asyncio
import dataclasses
import itertools
import json
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from oracles.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE
from processes.core_answers import answer_of, submit
from processes.fake_vllm.tokens import UNMASKED, next_token
from processes.vllm_stand_in import MAX_MODEL_LEN, MAX_NUM_SEQS, StandIn, stand_in
from stageline_api.engine_http import ErrorCode, FinishReason
from stageline_runtime.engine.core_api import (
    AdmittedRequest,
    CoreEvent,
    EndEvent,
    EngineRefusal,
    FailEvent,
    PromptEvent,
    TokenEvent,
)
from stageline_runtime.engine.errors import PromptError
from stageline_runtime.engine.text.tokenizer import EngineTokenizer
from stageline_runtime.plan_bus.messages import RequestSampling, WorkOutstanding
from stageline_runtime.plan_bus.prompt_report import PromptLogprobs, unpacked
from stageline_vllm.engine.core import VllmCore
from stageline_vllm.engine.generate_words import VllmAnswerError
from stageline_vllm.engine.vllm_exchange import VllmUnreachableError

PROMPT = (5, 9, 33, 120)
GREEDY = RequestSampling(temperature=0.0)
SAMPLED = RequestSampling(temperature=0.9, top_p=0.8, seed=7, frequency_penalty=0.5)
SCHEMA = json.dumps({
    "type": "object", "properties": {"n": {"enum": ["ab", "cd"]}}, "required": ["n"], "additionalProperties": False,
})  # fmt: skip
GUIDED = RequestSampling(temperature=1.0, seed=3, json_schema=SCHEMA)
_names = itertools.count()


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    with stand_in(tmp_path_factory.mktemp("vllm")) as one:
        yield one


def request(
    sampling: RequestSampling = GREEDY,
    *,
    prompt: tuple[int, ...] = PROMPT,
    new_tokens: int = 12,
    generated: tuple[int, ...] = (),
    stops: frozenset[int] = frozenset({EOS_TOKEN_ID}),
    priority: int = 0,
    adapter: str | None = None,
) -> AdmittedRequest:
    return AdmittedRequest(
        request_id=f"r{next(_names)}",
        prompt_token_ids=prompt,
        sampling=msgspec.structs.replace(sampling, num_prompt_tokens=len(prompt)),
        max_new_tokens=new_tokens,
        stop_token_ids=stops,
        generated_token_ids=generated,
        priority=priority,
        adapter=adapter,
    )


@asynccontextmanager
async def core_of(vllm: StandIn, *, max_running: int = MAX_NUM_SEQS, max_waiting: int = 64) -> AsyncIterator[VllmCore]:
    core = vllm.core(max_running=max_running, max_waiting=max_waiting)
    try:
        yield core
    finally:
        await core.close()


def answers(vllm: StandIn, *requests: AdmittedRequest) -> list[list[CoreEvent]]:
    async def run() -> list[list[CoreEvent]]:
        async with core_of(vllm) as core:
            return await asyncio.gather(*(answer_of(core, each) for each in requests))

    return asyncio.run(run())


def ids(events: list[CoreEvent]) -> list[int]:
    return [token for event in events if isinstance(event, TokenEvent) for token in event.token_ids]


def model_tokens(count: int, adapter: str | None = None) -> list[int]:
    """What the stand-in's model says after `PROMPT`, greedily."""
    known = list(PROMPT)
    for _ in range(count):
        known.append(next_token(known, {"temperature": 0.0}, draws=0, vocabulary=VOCAB_SIZE, adapter=adapter))
    return known[len(PROMPT) :]


def test_tokens_come_one_by_one_and_the_limit_ends_them(vllm: StandIn) -> None:
    (events,) = answers(vllm, request())
    assert ids(events) == model_tokens(12)
    assert [len(event.token_ids) for event in events if isinstance(event, TokenEvent)] == [1] * 12
    assert events[-1] == EndEvent(FinishReason.LENGTH)


def test_a_stop_token_is_the_last_of_the_answer(vllm: StandIn) -> None:
    stop = model_tokens(12)[5]
    (events,) = answers(vllm, request(stops=frozenset({stop})))
    expected = model_tokens(12)
    assert ids(events) == expected[: expected.index(stop) + 1]
    assert events[-1] == EndEvent(FinishReason.STOP)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, GUIDED], ids=["greedy", "sampled", "guided"])
def test_an_answer_goes_on_where_another_group_left_it(vllm: StandIn, sampling: RequestSampling) -> None:
    (whole,) = answers(vllm, request(sampling, new_tokens=10))
    expected = ids(whole)
    cuts = range(1, len(expected))
    rest = answers(vllm, *(request(sampling, new_tokens=10, generated=tuple(expected[:cut])) for cut in cuts))
    for cut, events in zip(cuts, rest, strict=True):
        assert ids(events) == expected[cut:], f"left after {cut} tokens"
        assert events[-1] == whole[-1]


def test_choices_of_one_prompt_are_told_apart_by_their_noise(vllm: StandIn) -> None:
    choices = [msgspec.structs.replace(SAMPLED, choice=choice) for choice in range(3)]
    first, second = (answers(vllm, *(request(each) for each in choices)) for _ in range(2))
    assert [ids(each) for each in first] == [ids(each) for each in second]
    assert len({tuple(ids(each)) for each in first}) == 3


@pytest.mark.parametrize("asked", [0, 1, 5, 20])
def test_log_probabilities_are_as_many_as_were_asked_for(vllm: StandIn, asked: int) -> None:
    (events,) = answers(vllm, request(RequestSampling(temperature=0.0, num_top_logprobs=asked)))
    told = [event.logprobs[0] for event in events if isinstance(event, TokenEvent)]
    assert len(told) == 12
    assert all(len(each.top) == asked for each in told)
    assert all([*each.top] == sorted(each.top, key=lambda one: -one[1]) for each in told)


def test_guided_answers_are_of_the_schema(vllm: StandIn) -> None:
    seeds = [msgspec.structs.replace(GUIDED, seed=seed) for seed in range(6)]
    tokenizer = EngineTokenizer.load(vllm.model_dir)
    for events in answers(vllm, *(request(each, new_tokens=200) for each in seeds)):
        assert events[-1] == EndEvent(FinishReason.STOP), events
        assert json.loads(tokenizer.decode(tuple(ids(events)[:-1])))["n"] in ("ab", "cd")


def test_a_token_that_the_grammar_does_not_admit_never_gets_through(tmp_path: Path) -> None:
    with stand_in(tmp_path, environment={UNMASKED: "1"}) as vllm:
        (events,) = answers(vllm, request(GUIDED))
    (failed,) = events
    assert isinstance(failed, FailEvent)
    assert failed.is_final
    assert "can't be guided any further: token" in failed.message


def test_output_that_no_grammar_of_ours_gave_is_not_continued(vllm: StandIn) -> None:
    (events,) = answers(vllm, request(GUIDED, generated=(200, 201)))
    (failed,) = events
    assert isinstance(failed, FailEvent)
    assert failed.is_final
    assert "token 200 is not admitted" in failed.message


def test_an_adapter_is_asked_for_by_its_name(vllm: StandIn) -> None:
    (events,) = answers(vllm, request(adapter="pirate"))
    assert ids(events) == model_tokens(12, "pirate") != model_tokens(12)


def test_what_vllm_refuses_is_told_as_it_says_it(vllm: StandIn) -> None:
    (longer,) = answers(vllm, request(new_tokens=MAX_MODEL_LEN))
    (failed,) = longer
    assert isinstance(failed, FailEvent)
    assert failed.is_final
    assert f"maximum context length is {MAX_MODEL_LEN}" in failed.message


def test_an_adapter_of_another_revision_is_for_another_group_to_answer(vllm: StandIn) -> None:
    with pytest.raises(EngineRefusal, match="no adapter 'nobody'") as refused:
        answers(vllm, request(adapter="nobody"))
    assert refused.value.code is ErrorCode.NOT_READY


def test_leaving_aborts_the_request_in_vllm(vllm: StandIn) -> None:
    async def run() -> None:
        async with core_of(vllm) as core:
            asked = request(new_tokens=200)
            events = submit(core, asked)
            await anext(events)
            core.abort(asked.request_id)
            assert [event async for event in events if not isinstance(event, TokenEvent)] == [
                EndEvent(FinishReason.ABORT)
            ]
            assert core.status().requests_running == 0
            await asyncio.to_thread(vllm.wait_until, "num_requests_running", 0)
            core.abort(asked.request_id)
            # The same id may come again at once.
            again = dataclasses.replace(asked, max_new_tokens=3)
            assert ids(await answer_of(core, again)) == model_tokens(3)

    asyncio.run(run())


def test_who_waits_is_taken_by_priority_and_then_by_arrival(vllm: StandIn) -> None:
    async def run() -> None:
        async with core_of(vllm, max_running=1, max_waiting=3) as core:
            ended: list[int] = []

            async def ask(priority: int) -> None:
                await answer_of(core, request(priority=priority, new_tokens=20))
                ended.append(priority)

            tasks = [asyncio.create_task(ask(priority)) for priority in (5, 3, 1)]
            await asyncio.sleep(0)
            assert core.load().queue_room == 0
            with pytest.raises(EngineRefusal, match="3 requests are waiting") as refused:
                core.submit(request(), lambda _event: None)
            assert refused.value.code is ErrorCode.QUEUE_FULL
            await asyncio.gather(*tasks)
            assert ended == [1, 3, 5]
            assert core.load().queue_room == 3

    asyncio.run(run())


def test_no_more_than_allowed_run_and_the_others_hear_of_steps(vllm: StandIn) -> None:
    async def run() -> None:
        async with core_of(vllm, max_running=2) as core:
            asked = [request(new_tokens=60) for _ in range(5)]
            streams = [submit(core, each) for each in asked]
            await anext(streams[0])
            assert (core.load().running, core.load().waiting) == (2, 3)
            assert core.steps_while_queued(asked[0].request_id) is None, "it runs"
            before = core.steps_while_queued(asked[4].request_id)
            for _ in range(5):
                await anext(streams[0])
            after = core.steps_while_queued(asked[4].request_id)
            assert before is not None
            assert after is not None
            assert after > before
            for stream in streams:
                events = [event async for event in stream]
                assert isinstance(events[-1], EndEvent)
            core.start_drain()
            await asyncio.wait_for(core.drained.wait(), 60)
            assert core.seconds_without_progress() == 0.0

    asyncio.run(run())


def test_stages_are_told_while_work_is_outstanding(vllm: StandIn) -> None:
    async def run() -> None:
        async with core_of(vllm) as core:
            told: list[object] = []
            core.attach(told.append)
            await asyncio.gather(*(answer_of(core, request()) for _ in range(3)))
            core.start_drain()
            await asyncio.wait_for(core.drained.wait(), 60)
            assert told == [WorkOutstanding(True), WorkOutstanding(False)]

    asyncio.run(run())


def test_a_drain_lets_answers_finish_and_takes_no_more(vllm: StandIn) -> None:
    async def run() -> None:
        async with core_of(vllm, max_running=1) as core:
            streams = [submit(core, request()) for _ in range(2)]
            core.start_drain("a test")
            with pytest.raises(EngineRefusal, match="draining"):
                core.submit(request(), lambda _event: None)
            for stream in streams:
                assert ids([event async for event in stream]) == model_tokens(12)
            await asyncio.wait_for(core.drained.wait(), 60)

    asyncio.run(run())


def test_a_vllm_that_dies_fails_its_answers_for_another_group_to_continue(tmp_path: Path) -> None:
    async def run(vllm: StandIn) -> None:
        async with core_of(vllm) as core:
            stream = submit(core, request(new_tokens=200))
            await anext(stream)
            vllm.kill()
            events = [event async for event in stream]
            assert isinstance(events[-1], FailEvent)
            assert not events[-1].is_final
            assert "could not finish this answer" in events[-1].message
            (failed,) = await answer_of(core, request())
            assert isinstance(failed, FailEvent)
            assert not failed.is_final
            assert "can't be reached" in failed.message

    with stand_in(tmp_path) as vllm:
        asyncio.run(run(vllm))


@pytest.mark.parametrize(("status", "words"), [(401, "wants another key"), (429, "Too Many Requests")])
def test_a_server_that_takes_nothing_leaves_the_answer_to_another_group(
    tmp_path: Path, status: int, words: str
) -> None:
    async def run(vllm: StandIn) -> None:
        async with core_of(vllm) as core:
            (failed,) = await answer_of(core, request())
            assert isinstance(failed, FailEvent)
            assert not failed.is_final, failed
            assert f"vLLM failed ({status}): " in failed.message
            assert words in failed.message
            with pytest.raises(VllmAnswerError, match=words):
                await core.warm_up()

    with stand_in(tmp_path, environment={"FAKE_VLLM_REFUSE_WITH": str(status)}) as vllm:
        asyncio.run(run(vllm))


def test_a_lost_group_fails_all_at_once(vllm: StandIn) -> None:
    async def run() -> None:
        async with core_of(vllm, max_running=1) as core:
            streams = [submit(core, request(new_tokens=200)) for _ in range(3)]
            await anext(streams[0])
            core.fail_all("the group failed: stage 1 is gone")
            for stream in streams:
                ends = FailEvent("the group failed: stage 1 is gone", was_waiting=stream is not streams[0])
                assert [e async for e in stream][-1] == ends
            await asyncio.to_thread(vllm.wait_until, "num_requests_running", 0)

    asyncio.run(run())


def test_cached_beginnings_and_vllms_own_figures_are_told(vllm: StandIn) -> None:
    async def run() -> None:
        async with core_of(vllm) as core:
            prompt = tuple(range(100, 150))
            cached = []
            for _ in range(2):
                events = await answer_of(core, request(prompt=prompt))
                cached.append(max(e.cached_prompt_tokens for e in events if isinstance(e, TokenEvent)))
            assert cached == [0, 48]
            core.beat_if_idle()
            while not (page := core.metrics_page()[0].decode()).count("stageline_kv_blocks{"):
                await asyncio.sleep(0.01)
                core._figures_at = float("-inf")
                core.beat_if_idle()
            values = {
                line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line[0] != "#"
            }
            label = '{model_name="tiny"}'
            assert values[f"stageline_prefix_cache_hits_total{label}"] >= 48
            assert values[f"stageline_engine_plans_total{label}"] >= 24
            assert values[f"stageline_engine_generation_tokens_total{label}"] == 24
            assert values[f"stageline_num_requests_running{label}"] == 0
            assert sum(value for name, value in values.items() if name.startswith("stageline_kv_blocks{")) == 64

    asyncio.run(run())


def test_the_warm_up_takes_one_token_or_says_why_not(vllm: StandIn, tmp_path: Path) -> None:
    async def run(one: StandIn) -> None:
        async with core_of(one) as core:
            await core.warm_up()

    asyncio.run(run(vllm))
    with (
        stand_in(tmp_path, environment={"FAKE_VLLM_FAULTS": "0:step1:raise"}) as broken,
        pytest.raises((VllmAnswerError, VllmUnreachableError), match="vLLM"),
    ):
        asyncio.run(run(broken))


TOLD = RequestSampling(temperature=0.0, num_top_prompt_logprobs=2)


def told(events: list[CoreEvent]) -> dict[int, PromptLogprobs]:
    """Position in the prompt -> what was told of the token there."""
    reports = [event.report for event in events if isinstance(event, PromptEvent)]
    return {
        position: one
        for report in reports
        for position, one in enumerate(unpacked(report, 0, report.num_tokens), start=report.position)
    }


@pytest.mark.parametrize("known", [0, 1, 3])
def test_log_probabilities_of_a_prompt_come_before_its_answer(vllm: StandIn, known: int) -> None:
    (events,) = answers(vllm, dataclasses.replace(request(TOLD), prompt_told=known))
    found = told(events)
    assert list(found) == list(range(max(1, known), len(PROMPT)))
    for position, one in found.items():
        token = PROMPT[position]
        assert one.rank == 3
        assert one.logprob == pytest.approx(-math.log(4))
        assert [index for index, _ in one.top] == [token + 1, token + 2]
    assert ids(events) == model_tokens(12)
    assert isinstance(events[0], PromptEvent)
    assert {event.cached_prompt_tokens for event in events if isinstance(event, TokenEvent)} == {0}


def test_what_was_told_is_not_asked_again(vllm: StandIn) -> None:
    before = vllm.figure("prompt_tokens_total")
    (events,) = answers(vllm, dataclasses.replace(request(TOLD), prompt_told=len(PROMPT)))
    assert told(events) == {}
    assert vllm.figure("prompt_tokens_total") - before == len(PROMPT)


def test_an_answer_without_output_asks_once(vllm: StandIn) -> None:
    before = vllm.figure("prompt_tokens_total")
    (events,) = answers(vllm, dataclasses.replace(request(TOLD, new_tokens=1), prompt_told=0, is_prompt_only=True))
    assert len(told(events)) == len(PROMPT) - 1
    assert events[-1] == EndEvent(FinishReason.LENGTH)
    assert vllm.figure("prompt_tokens_total") - before == len(PROMPT)


def test_a_prompt_of_which_too_much_would_be_told_is_refused(vllm: StandIn) -> None:
    sampling = RequestSampling(temperature=0.0, num_top_prompt_logprobs=20)
    with pytest.raises(PromptError, match="4000 prompt tokens, with prompt_logprobs = 20") as refused:
        answers(vllm, request(sampling, prompt=(5,) * 4000))
    assert refused.value.param == "prompt_logprobs"
