"""Workloads of groups whose stages have ranks. Where these divide experts there are many slots, of which each rank has
some; where they share layers, plans are those of any group.
"""

from dataclasses import replace
from random import Random

import msgspec

from chaos.drafting_workloads import drafting_workload
from chaos.local_workloads import SLOT_TOKENS, Add, Ask, Workload, draw_workload
from oracles.scripted_drafts import Drafting
from stageline_runtime.plan_bus.step_plan import blocks_of


def ranked_workload(seed: int, num_stages: int, drafting: Drafting | None = None) -> Workload:
    """With two or three ranks, which have little cache in most."""
    random = Random(f"ranks {seed}")
    workload = _drawn(seed, num_stages, drafting)
    num_ranks = random.choice((2, 2, 3))
    ranked = replace(
        workload,
        slots_per_cohort=random.randint(2, 3),
        num_ranks=num_ranks,
        num_blocks=None,
    )
    if random.random() < 0.25:
        return ranked
    return replace(ranked, num_blocks=random.randint(blocks_of(SLOT_TOKENS), ranked.most_blocks))


def shared_workload(seed: int, num_stages: int, drafting: Drafting | None = None) -> Workload:
    """With two or three ranks that share layers; some requests restrict what may be drawn, whatever the group has."""
    random = Random(f"shared {seed}")
    workload = _drawn(seed, num_stages, drafting)
    script = tuple(
        replace(timed, act=Add(tuple(_restricted(ask, random) for ask in timed.act.asks)))
        if isinstance(timed.act, Add)
        else timed
        for timed in workload.script
    )
    return replace(workload, script=script, num_ranks=random.choice((2, 2, 3)), shares_layers=True)


def _restricted(ask: Ask, random: Random) -> Ask:
    if ask.sampling.temperature == 0.0 or random.random() < 0.5:
        return ask
    top_p, top_k = random.choice(((0.6, 0), (1.0, 4), (0.9, 12)))
    return replace(ask, sampling=msgspec.structs.replace(ask.sampling, top_p=top_p, top_k=top_k))


def _drawn(seed: int, num_stages: int, drafting: Drafting | None) -> Workload:
    """Of a group without ranks."""
    return (
        draw_workload(Random(seed), num_stages) if drafting is None else drafting_workload(seed, num_stages, drafting)
    )
