"""Workloads of `local_workloads` whose requests draft, and answer at more length: there is something to guess.

And some in which a request is given up or loses its slot amid its drafts, which is rare among the others.
"""

from dataclasses import replace
from random import Random

from chaos.local_workloads import SLOT_TOKENS, STEMS, Abort, Add, Ask, Timed, Workload, draw_workload
from oracles.hash_model import VOCAB_SIZE
from oracles.scripted_drafts import Drafting
from stageline_runtime.plan_bus.messages import RequestSampling
from stageline_runtime.plan_bus.step_plan import blocks_of


def drafting_workload(seed: int, num_stages: int, drafting: Drafting) -> Workload:
    workload = draw_workload(Random(seed), num_stages)
    script = tuple(
        replace(timed, act=Add(tuple(map(_longer, timed.act.asks)))) if isinstance(timed.act, Add) else timed
        for timed in workload.script
    )
    return replace(workload, script=script, drafting=drafting)


def _longer(ask: Ask) -> Ask:
    return replace(ask, max_new_tokens=min(3 * ask.max_new_tokens, SLOT_TOKENS - len(ask.prompt)))


def broken_off_workload(seed: int, num_stages: int, drafting: Drafting) -> Workload:
    """One long answer, alone, with cache for itself; amid it its client leaves, or a request that goes before it needs
    all cache. Then somebody goes on from some of what it had said, and finds that in the cache.
    """
    random = Random(seed)
    first = _ask(random, STEMS[0][: random.randint(1, 20)], 40)
    urgent = _ask(random, STEMS[1], 3)
    moment = random.randint(3, 9)
    interruption = Add((urgent,)) if seed % 2 else Abort(0)
    again = replace(first, tokens_known=random.randint(0, 30))
    return Workload(
        num_stages=num_stages,
        slots_per_cohort=1,
        max_step_tokens=40,
        script=(
            Timed(0, Add((replace(first, priority=1),))),
            Timed(moment, interruption),
            Timed(moment + random.randint(0, 4), Add((again,))),
        ),
        num_blocks=blocks_of(SLOT_TOKENS),
        prefix_cache=True,
        drafting=drafting,
    )


def _ask(random: Random, prompt: tuple[int, ...], length: int) -> Ask:
    own = (*prompt, random.randrange(VOCAB_SIZE))
    sampling = RequestSampling(
        temperature=random.choice((0.0, 1.0)), seed=random.randrange(99), num_prompt_tokens=len(own)
    )
    return Ask(prompt=own, max_new_tokens=length, stop_token_ids=frozenset(), sampling=sampling)
