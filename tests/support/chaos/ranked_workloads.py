"""Workloads of groups whose stages' experts are divided among ranks: many slots, of which each rank has some."""

from dataclasses import replace
from random import Random

from chaos.drafting_workloads import drafting_workload
from chaos.local_workloads import SLOT_TOKENS, Workload, draw_workload
from oracles.scripted_drafts import Drafting
from stageline_runtime.plan_bus.step_plan import blocks_of


def ranked_workload(seed: int, num_stages: int, drafting: Drafting | None = None) -> Workload:
    """With two or three ranks, which have a cache each in every other workload, and little of it in most."""
    random = Random(f"ranks {seed}")
    if drafting is None:
        workload = draw_workload(Random(seed), num_stages)
    else:
        workload = drafting_workload(seed, num_stages, drafting)
    num_ranks = random.choice((2, 2, 3))
    num_pools = random.choice((1, num_ranks))
    ranked = replace(
        workload,
        slots_per_cohort=random.randint(2, 3),
        num_ranks=num_ranks,
        num_pools=num_pools,
        num_blocks=None,
    )
    if random.random() < 0.25:
        return ranked
    return replace(ranked, num_blocks=random.randint(blocks_of(SLOT_TOKENS), ranked.most_blocks))
