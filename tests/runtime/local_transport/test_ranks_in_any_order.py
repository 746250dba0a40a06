"""Ranks of a stage, in whatever order plans, tensors and exchanges come: none waits for ever.

The runs and checks are those of `test_every_order_gives_the_same_tokens`. Each rank of each stage has a bus and a lane
of its own, and a cache where ranks divide experts; every plan's layers are a barrier of all ranks of a stage, whose
exchanges must be alike. So a rank that had to know what another one has, in order to go on, would be a deadlock under
some seed. Where they share layers, they draw from their parts of the vocabulary and agree on every token.
"""

from collections import Counter
from collections.abc import Callable

import pytest

from chaos.broken_rank_rules import BROKEN_RANK_RULES, BROKEN_RULES_OF_SHARED_LAYERS
from chaos.interleaving import DeadlockError
from chaos.local_core import LocalCore
from chaos.local_group import run_group
from chaos.local_transport import WireError
from chaos.local_workloads import Workload
from chaos.ranked_workloads import ranked_workload, shared_workload
from oracles.scripted_drafts import Drafting
from stageline_runtime.plan_bus.step_plan import BusProtocolError

RUNS = 25
CORE_RUNS = 10
BUDGET_RUNS = 60
NUMS_OF_STAGES = pytest.mark.parametrize(
    "num_stages", [2, *(pytest.param(count, marks=pytest.mark.soak) for count in (1, 3))]
)


MakesWorkload = Callable[[int, int, Drafting | None], Workload]


def runs(count: int, num_stages: int, drafting: Drafting | None, make: MakesWorkload = ranked_workload) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(count):
        try:
            seen += run_group(make(seed, num_stages, drafting), seed).seen
        except Exception as error:
            error.add_note(f"num_stages {num_stages}, seed {seed}")
            raise
    return seen


@NUMS_OF_STAGES
def test_drawn_workloads(num_stages: int) -> None:
    seen = runs(RUNS, num_stages, None)
    expected = {
        "abort between tokens",
        "beginning shared",
        "heartbeat between plans",
        "idle rank",
        "more than a rank holds",
        "preemption",
        "block used again",
    }
    assert expected <= {what for what, times in seen.items() if times}, seen


@NUMS_OF_STAGES
@pytest.mark.parametrize("drafting", [pytest.param(Drafting.RANDOM, marks=pytest.mark.thorough), Drafting.MODEL])
def test_drawn_workloads_with_drafts(num_stages: int, drafting: Drafting) -> None:
    """Draft steps are in the plan: a rank whose requests want none runs none, and nobody waits for it there."""
    seen = runs(RUNS, num_stages, drafting)
    expected = {"idle rank", "verifying row", "preemption"}
    if drafting is Drafting.MODEL:
        expected |= {
            "rank drafts nothing",
            "drafted by the model",
            "all drafts hold",
            "drafts before all have answered",
        }
    assert expected <= {what for what, times in seen.items() if times}, seen


@NUMS_OF_STAGES
@pytest.mark.parametrize(
    "drafting",
    [*(pytest.param(each, marks=pytest.mark.thorough) for each in (None, Drafting.RANDOM)), Drafting.MODEL],
)
def test_ranks_that_share_layers_draw_alike(num_stages: int, drafting: Drafting | None) -> None:
    """Whatever runs dead or lost its slot meanwhile, and whether or not a plan is drawn by parts."""
    seen = runs(RUNS, num_stages, drafting, shared_workload)
    expected = {"dead row", "preemption", "heartbeat between plans", "abort between tokens"}
    if drafting is Drafting.MODEL:
        expected |= {"drafted by the model", "all drafts hold"}
    elif drafting is Drafting.RANDOM:
        expected |= {"verifying row"}
    assert expected <= {what for what, times in seen.items() if times}, seen


@pytest.mark.parametrize("make", [ranked_workload, pytest.param(shared_workload, marks=pytest.mark.thorough)])
def test_streams_of_the_engine_core(make: MakesWorkload) -> None:
    for seed in range(CORE_RUNS):
        try:
            run_group(make(seed, 2, Drafting.MODEL), seed, engine_type=LocalCore)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


DRAFTING = (None, Drafting.RANDOM, Drafting.MODEL, Drafting.RANDOM)
"""Of the searches for broken rules, in turn."""


@pytest.mark.parametrize(
    ("break_rule", "make"),
    [
        *((rule, ranked_workload) for rule in BROKEN_RANK_RULES),
        *((rule, shared_workload) for rule in BROKEN_RULES_OF_SHARED_LAYERS),
    ],
    ids=lambda each: each.__name__,
)
def test_a_broken_rule_of_ranks_is_found(
    break_rule: Callable[[pytest.MonkeyPatch], None], make: MakesWorkload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search that can't fail shows nothing."""
    break_rule(monkeypatch)
    for seed in range(BUDGET_RUNS):
        try:
            run_group(make(seed, 1 + seed % 2, DRAFTING[seed % 4]), seed)
        except (AssertionError, BusProtocolError, ValueError, WireError, DeadlockError):
            return
    raise AssertionError(f"not found in {BUDGET_RUNS} runs")
