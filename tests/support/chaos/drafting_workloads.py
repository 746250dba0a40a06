"""Workloads of `local_workloads` whose requests draft, and answer at more length: there is something to guess."""

from dataclasses import replace
from random import Random

from chaos.local_workloads import SLOT_TOKENS, Add, Ask, Workload, draw_workload
from oracles.scripted_drafts import Drafting


def drafting_workload(seed: int, num_stages: int, drafting: Drafting) -> Workload:
    workload = draw_workload(Random(seed), num_stages)
    script = tuple(
        replace(timed, act=Add(tuple(map(_longer, timed.act.asks)))) if isinstance(timed.act, Add) else timed
        for timed in workload.script
    )
    return replace(workload, script=script, drafting=drafting)


def _longer(ask: Ask) -> Ask:
    return replace(ask, max_new_tokens=min(3 * ask.max_new_tokens, SLOT_TOKENS - len(ask.prompt)))
