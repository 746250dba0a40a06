"""Ranks that divide experts, in whatever order plans, cancellations, tensors and exchanges come: none waits for ever.

The runs and checks are those of `test_every_order_gives_the_same_tokens`. Each rank of each stage has a bus, a cache
and a lane of its own, and every plan's layers are a barrier of all ranks of a stage, whose exchanges must be alike. So
a rank that had to know what another one has, in order to go on, would be a deadlock under some seed.
"""

from collections import Counter
from collections.abc import Callable

import pytest

from chaos.broken_rank_rules import BROKEN_RANK_RULES
from chaos.interleaving import DeadlockError
from chaos.local_core import LocalCore
from chaos.local_group import run_group
from chaos.local_transport import WireError
from chaos.ranked_workloads import ranked_workload
from oracles.scripted_drafts import Drafting

RUNS = 25
MORE_RUNS = 40
"""Until some cancellations reach all ranks in time."""
CORE_RUNS = 10
BUDGET_RUNS = 60


def runs(count: int, num_stages: int, drafting: Drafting | None) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(count):
        try:
            seen += run_group(ranked_workload(seed, num_stages, drafting), seed).seen
        except Exception as error:
            error.add_note(f"num_stages {num_stages}, seed {seed}")
            raise
    return seen


@pytest.mark.parametrize("num_stages", [1, 2, pytest.param(3, marks=pytest.mark.thorough)])
def test_drawn_workloads(num_stages: int) -> None:
    seen = runs(RUNS, num_stages, None)
    expected = {
        "abort between tokens",
        "beginning copied",
        "beginning kept in its slot",
        "heartbeat between plans",
        "idle rank",
        "more than a pool holds",
        "preemption",
        "slot trimmed",
    }
    assert expected <= {what for what, times in seen.items() if times}, seen


@pytest.mark.parametrize("num_stages", [1, 2, pytest.param(3, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("drafting", [Drafting.RANDOM, Drafting.MODEL])
def test_drawn_workloads_with_drafts(num_stages: int, drafting: Drafting) -> None:
    """Draft steps are in the plan: a rank whose requests want none runs none, and nobody waits for it there."""
    seen = runs(MORE_RUNS if drafting is Drafting.RANDOM else RUNS, num_stages, drafting)
    expected = {"idle rank", "verifying row", "preemption"}
    if drafting is Drafting.MODEL:
        expected |= {"rank drafts nothing", "drafted by the model", "all drafts hold"}
    elif num_stages > 1:
        expected |= {"chain", "cancelled", "not computed"}
    assert expected <= {what for what, times in seen.items() if times >= 3}, seen


@pytest.mark.parametrize("drafting", [None, Drafting.MODEL])
def test_streams_of_the_engine_core(drafting: Drafting | None) -> None:
    for seed in range(CORE_RUNS):
        try:
            run_group(ranked_workload(seed, 2, drafting), seed, engine_type=LocalCore)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.parametrize("break_rule", BROKEN_RANK_RULES, ids=lambda rule: rule.__name__)
def test_a_broken_rule_of_ranks_is_found(
    break_rule: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search that can't fail shows nothing."""
    break_rule(monkeypatch)
    for seed in range(BUDGET_RUNS):
        try:
            run_group(ranked_workload(seed, 1 + seed % 2, Drafting.RANDOM if seed % 2 else None), seed)
        except (AssertionError, WireError, DeadlockError):
            return
    raise AssertionError(f"not found in {BUDGET_RUNS} runs")
