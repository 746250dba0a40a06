"""Whatever order plans, tensors, feedback, answers, arrivals and aborts come in: each request gets its own tokens.

Every run is checked as `local_engine`, `local_group` and `watched_slot_tokens` say: no token wrong, lost, given twice
or after an abort; no stale feedback applied; plans in order; no receive that a plan doesn't name, none left over. A
failure names its seed; `run_group(draw_workload(Random(seed)), seed)` repeats it.
"""

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos.local_core import LocalCore
from chaos.local_group import run_group
from chaos.local_workloads import SLOT_TOKENS, Abort, Act, Add, Ask, Dummy, Heartbeat, Timed, Workload, draw_workload
from oracles.hash_model import VOCAB_SIZE
from oracles.scripted_drafts import Drafting
from stageline_runtime.plan_bus.messages import RequestSampling
from stageline_runtime.plan_bus.step_plan import blocks_of

RUNS = 200
FEW_RUNS = 80
"""Enough for each thing that may happen to happen."""
CORE_RUNS = 30


@pytest.mark.parametrize(
    ("num_stages", "runs"),
    [
        (3, FEW_RUNS),
        pytest.param(4, FEW_RUNS, marks=pytest.mark.thorough),
        *(pytest.param(count, RUNS, marks=pytest.mark.soak) for count in (1, 2, 3, 4)),
    ],
)
def test_drawn_workloads(num_stages: int, runs: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(runs):
        try:
            seen += run_group(draw_workload(Random(seed), num_stages), seed).seen
        except Exception as error:
            error.add_note(f"num_stages {num_stages}, seed {seed}")
            raise
    expected = {
        "abort after the end",
        "abort before the first token",
        "abort between tokens",
        "beginning shared",
        "chunk of a longer prompt",
        "continued",
        "dead row",
        "end by a stop token",
        "end by length",
        "heartbeat between plans",
        "preemption",
        "prompt told in parts",
        "slot reused",
        "block used again",
        "stale feedback",
    }
    assert expected <= {what for what, times in seen.items() if times >= 3}, seen


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    tokens = st.integers(0, VOCAB_SIZE - 1)
    prompt = tuple(draw(st.lists(tokens, min_size=1, max_size=12)))
    sampling = RequestSampling(
        temperature=draw(st.sampled_from([0.0, 1.0])),
        top_p=1.0,
        top_k=draw(st.sampled_from([0, 3])),
        seed=draw(st.integers(0, 9)),
        choice=draw(st.integers(0, 2)),
        frequency_penalty=draw(st.sampled_from([0.0, 2.0])),
        num_prompt_tokens=len(prompt),
        num_top_prompt_logprobs=draw(st.sampled_from([None, 0, 3])),
    )
    return Ask(
        prompt=prompt,
        max_new_tokens=draw(st.integers(1, 8)),
        stop_token_ids=draw(st.frozensets(tokens, max_size=6)),
        sampling=sampling,
        tokens_known=draw(st.integers(0, 5)),
        priority=draw(st.integers(-1, 1)),
        prompt_told=draw(st.integers(0, 13)),
    )


def workloads() -> st.SearchStrategy[Workload]:
    act: st.SearchStrategy[Act] = st.one_of(
        st.lists(asks(), min_size=1, max_size=4).map(lambda asks: Add(tuple(asks))),
        st.integers(0, 15).map(Abort),
        st.just(Heartbeat()),
        st.sampled_from([1, 4]).map(Dummy),
    )
    timed = st.builds(Timed, st.integers(0, 12), act)
    return st.builds(
        Workload,
        num_blocks=st.none() | st.integers(blocks_of(SLOT_TOKENS), 16),
        prefix_cache=st.booleans(),
        drafting=st.sampled_from([None, None, *Drafting]),
        num_stages=st.integers(1, 4),
        slots_per_cohort=st.integers(1, 2),
        max_step_tokens=st.integers(1, 16),
        script=st.lists(timed, max_size=8).map(tuple),
    )


@given(workload=workloads(), seed=st.integers(0, 2**32))
def test_any_workload(workload: Workload, seed: int) -> None:
    """The same, over workloads that shrink to the smallest that fails."""
    run_group(workload, seed)


def test_a_seed_gives_the_same_run_again() -> None:
    workloads = [draw_workload(Random(seed), 3) for seed in range(6)]
    once, again = ([[tuple(run_group(each, seed).plans) for seed in range(4)] for each in workloads] for _ in range(2))
    assert once == again
    assert max(len(set(runs)) for runs in once) > 1, "the seed decides nothing"


@pytest.mark.parametrize("num_stages", [pytest.param(1, marks=pytest.mark.soak), 3])
def test_streams_of_the_engine_core(num_stages: int) -> None:
    """Clients of the real core read late, leave and come back in any order; each stream has its tokens and one end."""
    for seed in range(CORE_RUNS):
        try:
            run_group(draw_workload(Random(seed), num_stages), seed, engine_type=LocalCore)
        except Exception as error:
            error.add_note(f"num_stages {num_stages}, seed {seed}")
            raise
