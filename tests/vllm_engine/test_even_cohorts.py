"""Even cohorts over stand-ins for vLLM's schedulers: each rule holds, and a plugin that breaks it is found."""

import inspect
import math
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from processes.vllm_scheduler_stand_in import (
    PLUGIN,
    AsyncScheduler,
    Request,
    Scheduler,
    even_cohorts_over_stand_ins,
    vllm_config,
)

Action = tuple[str, int]
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["add", "finish", "preempt", "answer", "schedule", "schedule"]), st.integers(1, 20)),
    max_size=60,
)


@pytest.fixture(scope="module")
def plugin() -> Iterator[ModuleType]:
    with even_cohorts_over_stand_ins() as module:
        yield module


def made(plugin: ModuleType, stages: int, most: int = 64, *, asynchronous: bool = False) -> Any:
    return plugin.even_cohorts_scheduler(vllm_config=vllm_config(stages, most, asynchronous=asynchronous))


def answer(scheduler: Any) -> None:
    """Every token on its way comes back."""
    for request in scheduler.running:
        if request.num_output_placeholders:
            request.num_tokens_with_spec += request.num_output_placeholders
            request.num_output_placeholders = 0
        elif request.num_computed_tokens == request.num_tokens_with_spec:
            request.num_tokens_with_spec += 1


def decoding(plugin: ModuleType, stages: int, count: int, *, asynchronous: bool = False, most: int = 64) -> Any:
    """A scheduler with this many ready decodes, r0 first."""
    scheduler = made(plugin, stages, most, asynchronous=asynchronous)
    for index in range(count):
        scheduler.add_request(Request(f"r{index}"))
    scheduler.schedule()
    answer(scheduler)
    scheduler.current_step += stages
    return scheduler


def names(requests: list[Request]) -> list[str]:
    return [request.request_id for request in requests]


def is_eligible(request: Any, scheduler: Any) -> bool:
    return bool(request.next_decode_eligible_step <= scheduler.current_step + 1)


def capped_step(scheduler: Any, stages: int) -> None:
    running = list(scheduler.running)
    prefill = {one.request_id for one in running if one.is_prefill_chunk}
    # One that was preempted still waits for the step at which its last token would have been back, as vLLM has it.
    due = {one.request_id for one in running if one.is_prefill_chunk and is_eligible(one, scheduler)}
    share = math.ceil(len(running) / stages)
    limit = scheduler.max_num_active_reqs
    output = scheduler.schedule()
    decodes = ({*names(running)} - prefill) & {*output.num_scheduled_tokens}
    assert len(decodes) <= share, (decodes, share, running)
    assert due & {*names(scheduler.running)} <= {*output.num_scheduled_tokens}, (due, output)
    assert scheduler.max_num_active_reqs == limit
    still = [one for one in running if one in scheduler.running]
    assert scheduler.running[: len(still)] == still, (names(running), names(scheduler.running))


def follow(scheduler: Any, stages: int, actions: list[Action]) -> None:
    number = 0
    for action, value in actions:
        match action:
            case "add":
                scheduler.add_request(Request(f"r{number}", num_tokens_with_spec=value))
                number += 1
            case "finish" if scheduler.running:
                scheduler.finish_requests(scheduler.running[value % len(scheduler.running)].request_id)
            case "preempt" if scheduler.running:
                scheduler.preempt_next = True
                capped_step(scheduler, stages)
            case "answer":
                answer(scheduler)
            case "schedule":
                capped_step(scheduler, stages)


@given(actions=ACTIONS, stages=st.integers(1, 5), asynchronous=st.booleans())
def test_no_sequence_of_calls_breaks_cap_order_or_limit(
    plugin: ModuleType, actions: list[Action], stages: int, asynchronous: bool
) -> None:
    follow(made(plugin, stages, 8, asynchronous=asynchronous), stages, actions)


@given(count=st.integers(1, 20), stages=st.integers(1, 5))
def test_every_ready_decode_is_scheduled_within_as_many_calls_as_stages(
    plugin: ModuleType, count: int, stages: int
) -> None:
    none_starves(plugin, count, stages)


def none_starves(plugin: ModuleType, count: int = 7, stages: int = 3) -> None:
    scheduler = decoding(plugin, stages, count)
    for _ in range(3):
        seen: set[str] = set()
        for _ in range(stages):
            seen |= {*scheduler.schedule().num_scheduled_tokens}
            answer(scheduler)
        assert seen == {*names(scheduler.running)}, seen


def cap_holds(plugin: ModuleType) -> None:
    for asynchronous in (False, True):
        assert len(decoding(plugin, 3, 7, asynchronous=asynchronous).schedule().num_scheduled_tokens) == 3


def prefill_is_not_capped(plugin: ModuleType) -> None:
    scheduler = decoding(plugin, 2, 2)
    for index in range(6):
        scheduler.add_request(Request(f"p{index}", num_tokens_with_spec=40))
    scheduler.schedule()
    scheduled = {*scheduler.schedule().num_scheduled_tokens}
    assert {f"p{index}" for index in range(6)} <= scheduled, scheduled


def order_is_vllms(plugin: ModuleType) -> None:
    scheduler = decoding(plugin, 2, 6)
    for _ in range(2):
        scheduler.add_request(Request(f"new{scheduler.current_step}"))
        before = names(scheduler.running)
        added = names(scheduler.waiting)
        scheduler.schedule()
        assert names(scheduler.running) == before + added


def a_raise_restores(plugin: ModuleType) -> None:
    scheduler = decoding(plugin, 2, 6, most=8)
    before, scheduler.fail_next = names(scheduler.running), True
    with pytest.raises(RuntimeError, match="no step today"):
        scheduler.schedule()
    assert (names(scheduler.running), scheduler.max_num_active_reqs) == (before, 8)


def preempted_stays_out(plugin: ModuleType) -> None:
    scheduler = decoding(plugin, 2, 6)
    scheduler.preempt_next = True
    scheduler.schedule()
    assert names(scheduler.running) == ["r0", "r1", "r3", "r4", "r5"]
    assert names(scheduler.waiting) == ["r2"]


def admission_counts_the_hidden(plugin: ModuleType) -> None:
    scheduler = decoding(plugin, 2, 6, most=7)
    for index in range(3):
        scheduler.add_request(Request(f"new{index}"))
    scheduler.schedule()
    assert names(scheduler.running) == ["r0", "r1", "r2", "r3", "r4", "r5", "new0"]
    assert scheduler.max_num_active_reqs == 7


def what_is_decided_takes_no_place(plugin: ModuleType) -> None:
    """The last tokens of r0 to r3 are on their way; vLLM would schedule none of them, so the step would be empty."""
    scheduler = decoding(plugin, 2, 8, asynchronous=True)
    for request in scheduler.running[:4]:
        request.max_tokens = 2
    assert {*scheduler.schedule().num_scheduled_tokens} == {"r0", "r1", "r2", "r3"}
    assert {*scheduler.schedule().num_scheduled_tokens} == {"r4", "r5", "r6", "r7"}
    scheduler.current_step += 2
    assert {*scheduler.schedule().num_scheduled_tokens} == {"r4", "r5", "r6", "r7"}


def finished_is_forgotten(plugin: ModuleType) -> None:
    scheduler = decoding(plugin, 2, 4)
    scheduler.finish_requests("r3")
    scheduler.schedule()
    assert names(scheduler.running) == ["r0", "r1", "r2"]
    assert "r3" not in scheduler._turn_of


Rule = Callable[[ModuleType], None]
STEP = "            return self._remember(super().schedule(*args, **kwargs))\n        finally:"
BREAKS: list[tuple[Rule, str, str]] = [
    (cap_holds, "len(ready) <= share", "len(ready) <= share + 99"),
    (none_starves, "self._turn_of[request_id] = self._turn", "pass"),
    (prefill_is_not_capped, "not request.is_prefill_chunk and ", ""),
    (order_is_vllms, "order.get(id(one), len(order))", "0"),
    (
        a_raise_restores,
        STEP,
        STEP.replace("return", "output =").replace("finally:", "except KeyError: raise\n        else:"),
    ),
    (
        preempted_stays_out,
        "sorted([*self.running, *surplus]",
        "sorted([r for r in [*self.running, *surplus, *self.waiting]]",
    ),
    (admission_counts_the_hidden, "= limit - len(surplus)", "= limit"),
    (what_is_decided_takes_no_place, "if on_their_way > 0 and", "if on_their_way > 99 and"),
    (finished_is_forgotten, "self._turn_of.pop(request_id, None)", "pass"),
]
RULES = pytest.mark.parametrize(("rule", "text", "broken"), BREAKS, ids=[rule.__name__ for rule, _, _ in BREAKS])


@RULES
def test_the_rule_holds_and_a_plugin_that_breaks_it_is_found(
    plugin: ModuleType, rule: Rule, text: str, broken: str
) -> None:
    rule(plugin)
    source = inspect.getsource(plugin)
    assert source.count(text) == 1, text
    variant = ModuleType("broken_cohorts")
    exec(compile(source.replace(text, broken), "broken_cohorts", "exec"), variant.__dict__)
    with pytest.raises(AssertionError):
        rule(variant)


def test_one_stage_schedules_as_vllm_does(plugin: ModuleType) -> None:
    assert {*decoding(plugin, 1, 9).schedule().num_scheduled_tokens} == {f"r{index}" for index in range(9)}


def test_the_configuration_says_which_scheduler_is_capped(plugin: ModuleType) -> None:
    synchronous, asynchronous = made(plugin, 2), made(plugin, 2, asynchronous=True)
    assert isinstance(synchronous, Scheduler)
    assert not isinstance(synchronous, AsyncScheduler)
    assert isinstance(asynchronous, AsyncScheduler)


def test_the_stand_ins_are_taken_out_again() -> None:
    before = {name for name in sys.modules if name.split(".")[0] == "vllm"}, PLUGIN in sys.modules
    with even_cohorts_over_stand_ins() as module:
        assert sys.modules[PLUGIN] is module
    assert ({name for name in sys.modules if name.split(".")[0] == "vllm"}, PLUGIN in sys.modules) == before
