"""A search that can't fail shows nothing: with any one rule broken, it finds an order in which that matters.

Each is found within fewer runs than the search over whole rules makes.
"""

from collections.abc import Callable
from random import Random

import pytest

from chaos.broken_cache_rules import BROKEN_CACHE_RULES
from chaos.broken_core_rules import BROKEN_CORE_RULES
from chaos.broken_rules import BROKEN_RULES
from chaos.interleaving import DeadlockError
from chaos.local_core import LocalCore
from chaos.local_engine import LocalEngine
from chaos.local_group import run_group
from chaos.local_transport import WireError
from chaos.local_workloads import draw_workload
from stageline_runtime.plan_bus.step_plan import BusProtocolError

BUDGET_RUNS = 100
CORE_BUDGET_RUNS = 40
Break = Callable[[pytest.MonkeyPatch], None]


def search(budget_runs: int, engine_type: type[LocalEngine]) -> str:
    """What the first run that goes wrong says."""
    for seed in range(budget_runs):
        try:
            run_group(draw_workload(Random(seed), 2 + seed % 3), seed, engine_type=engine_type)
        except (AssertionError, BusProtocolError, WireError, DeadlockError) as found:
            return f"{type(found).__name__}: {found}"
    return ""


@pytest.mark.parametrize("break_rule", [*BROKEN_RULES, *BROKEN_CACHE_RULES], ids=lambda rule: rule.__name__)
def test_a_broken_rule_is_found(break_rule: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    break_rule(monkeypatch)
    assert search(BUDGET_RUNS, LocalEngine), f"not found in {BUDGET_RUNS} runs"


@pytest.mark.parametrize("break_rule", BROKEN_CORE_RULES, ids=lambda rule: rule.__name__)
def test_a_broken_rule_of_the_core_is_found(break_rule: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    break_rule(monkeypatch)
    assert search(CORE_BUDGET_RUNS, LocalCore), f"not found in {CORE_BUDGET_RUNS} runs"
