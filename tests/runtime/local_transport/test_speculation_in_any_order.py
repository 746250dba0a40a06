"""Whatever drafts say and in whatever order things come: each request gets the tokens that it gets without drafts.

The runs and checks are those of `test_every_order_gives_the_same_tokens`, with verifying rows among the others.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from chaos.broken_draft_model_rules import BROKEN_DRAFT_MODEL_RULES
from chaos.broken_draft_rules import BROKEN_DRAFT_RULES
from chaos.drafting_workloads import broken_off_workload, drafting_workload
from chaos.interleaving import DeadlockError
from chaos.local_core import LocalCore
from chaos.local_group import run_group
from chaos.local_transport import WireError
from chaos.local_workloads import SLOT_TOKENS
from oracles.scripted_drafts import MODELS, Drafting
from stageline_runtime.plan_bus.step_plan import BusProtocolError, blocks_of

RUNS = 30
CORE_RUNS = 12
BUDGET_RUNS = 40
USUAL = (Drafting.RANDOM, Drafting.MODEL)


@pytest.mark.parametrize(
    "drafting", [each if each in USUAL else pytest.param(each, marks=pytest.mark.thorough) for each in Drafting]
)
@pytest.mark.parametrize("num_stages", [3, *(pytest.param(count, marks=pytest.mark.soak) for count in (1, 2, 4))])
def test_drawn_workloads_with_drafts(num_stages: int, drafting: Drafting) -> None:
    seen: Counter[str] = Counter()
    for seed in range(RUNS):
        try:
            seen += run_group(drafting_workload(seed, num_stages, drafting), seed).seen
        except Exception as error:
            error.add_note(f"num_stages {num_stages}, seed {seed}")
            raise
    expected = {"verifying row", "preemption", "stale feedback", "beginning shared", "abort between tokens"}
    match drafting:
        case Drafting.RIGHT:
            expected |= {"all drafts hold", "end by a stop token"}
        case Drafting.WRONG:
            expected |= {"no draft holds"}
        case Drafting.RANDOM:
            expected |= {"all drafts hold", "some drafts hold", "no draft holds"}
        case Drafting.LOOKUP:
            expected |= {"no draft holds"}
        case Drafting.MODEL:
            expected |= {"all drafts hold", "drafted by the model", "model has yet to catch up"}
        case Drafting.STRANGE_MODEL:
            expected |= {"no draft holds", "drafted by the model"}
    assert expected <= {what for what, times in seen.items() if times >= 3}, seen


@pytest.mark.parametrize(("num_stages", "runs"), [pytest.param(2, 24, marks=pytest.mark.thorough), (4, 8)])
def test_requests_that_end_amid_their_drafts(num_stages: int, runs: int) -> None:
    """What the drafts wrote hurts neither who takes the slot nor who goes on from what had been said."""
    seen: Counter[str] = Counter()
    for seed in range(runs):
        for drafting in (Drafting.RANDOM, Drafting.RIGHT):
            try:
                seen += run_group(broken_off_workload(seed, num_stages, drafting), seed).seen
            except Exception as error:
                error.add_note(f"num_stages {num_stages}, seed {seed}, {drafting}")
                raise
    expected = {"verifying row of a slot that passed on", "preemption", "beginning shared"}
    assert expected <= {what for what, times in seen.items() if times >= 5}, seen


@pytest.mark.parametrize(
    ("num_stages", "drafting"), [(3, Drafting.MODEL), pytest.param(1, Drafting.LOOKUP, marks=pytest.mark.thorough)]
)
def test_streams_of_the_engine_core_with_drafts(num_stages: int, drafting: Drafting) -> None:
    """By lookup and by a model, through the real core and its streams."""
    seen: Counter[str] = Counter()
    for seed in range(CORE_RUNS):
        try:
            seen += run_group(drafting_workload(seed, num_stages, drafting), seed, engine_type=LocalCore).seen
        except Exception as error:
            error.add_note(f"num_stages {num_stages}, seed {seed}")
            raise
    assert seen["verifying row"] >= 3, seen


@pytest.mark.parametrize("break_rule", BROKEN_DRAFT_RULES, ids=lambda rule: rule.__name__)
def test_a_broken_rule_of_drafts_is_found(
    break_rule: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search that can't fail shows nothing."""
    break_rule(monkeypatch)
    for seed in range(BUDGET_RUNS):
        workload = drafting_workload(seed, 2 + seed % 3, (Drafting.RANDOM, Drafting.RIGHT)[seed % 2])
        # With little cache a request loses its slot while a guess is in flight, which is rare otherwise.
        short = replace(workload, num_blocks=blocks_of(SLOT_TOKENS) + 1, slots_per_cohort=2)
        try:
            run_group(workload, seed)
            run_group(short, seed)
        except (AssertionError, BusProtocolError, WireError, DeadlockError):
            return
    raise AssertionError(f"not found in {BUDGET_RUNS} runs")


@pytest.mark.parametrize("break_rule", BROKEN_DRAFT_MODEL_RULES, ids=lambda rule: rule.__name__)
def test_a_broken_rule_of_the_draft_model_is_found(
    break_rule: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_rule(monkeypatch)
    for seed in range(BUDGET_RUNS):
        try:
            run_group(drafting_workload(seed, 1 + seed % 3, MODELS[seed % 2]), seed)
        except (AssertionError, BusProtocolError, WireError, DeadlockError):
            return
    raise AssertionError(f"not found in {BUDGET_RUNS} runs")


@pytest.mark.parametrize("context_tokens", [1, 20])
def test_a_draft_model_of_a_shorter_context_drafts_within_it(context_tokens: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(CORE_RUNS):
        workload = replace(drafting_workload(seed, 2, Drafting.MODEL), draft_context_tokens=context_tokens)
        seen += run_group(workload, seed).seen
    assert bool(seen["drafted by the model"]) == (context_tokens > 1), seen
