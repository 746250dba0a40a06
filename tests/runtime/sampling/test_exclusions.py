"""Tokens that a request may not draw next, against a plain reading of what its exclusions say."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from stageline_runtime.plan_bus.messages import PlanRow, RequestSampling, SlotFill, StepPlan
from stageline_runtime.sampling.exclusions import Tail, exclude
from stageline_runtime.stage.step.sampling_state import SamplingState

VOCAB_SIZE = 6
PROMPT = (1, 2, 3)


def left(sampling: RequestSampling, output: list[int]) -> set[int]:
    """Tokens that may follow `output`, taken one by one."""
    tail = Tail(sampling.bad_words)
    for token in output:
        tail.add((token,))
    logits = torch.zeros(VOCAB_SIZE)
    exclude(logits, sampling, sampling.num_prompt_tokens + len(output), tail)
    assert set(logits.tolist()) <= {0.0, float("-inf")}
    return set((logits == 0.0).nonzero().squeeze(1).tolist())


def test_ends_are_kept_out_until_the_answer_is_long_enough() -> None:
    sampling = RequestSampling(min_tokens=2, end_token_ids=(0, 5), num_prompt_tokens=7)
    assert [left(sampling, [1] * length) for length in range(4)] == [
        {1, 2, 3, 4},
        {1, 2, 3, 4},
        set(range(6)),
        set(range(6)),
    ]


def test_only_what_is_allowed_is_left_and_less_what_is_banned() -> None:
    sampling = RequestSampling(allowed_token_ids=(1, 2, 4), bad_words=((4,), (5,)))
    assert left(sampling, []) == {1, 2}


def test_a_word_is_banned_where_its_beginning_stands_in_the_output_alone() -> None:
    sampling = RequestSampling(bad_words=((1, 2, 3), (2, 4)))
    assert left(sampling, [1]) == set(range(6))
    assert left(sampling, [1, 2]) == {0, 1, 2, 5}
    assert left(sampling, [0, 2]) == {0, 1, 2, 3, 5}
    assert left(sampling, [1, 2, 0]) == set(range(6))


@given(
    st.lists(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=4).map(tuple), max_size=6),
    st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=12),
)
def test_no_banned_word_is_ever_completed(words: list[tuple[int, ...]], output: list[int]) -> None:
    excluded = {word[-1] for word in words if tuple([*output, word[-1]][-len(word) :]) == word}
    assert left(RequestSampling(bad_words=tuple(words)), output) == set(range(VOCAB_SIZE)) - excluded


def test_tokens_taken_at_once_count_as_those_taken_one_by_one() -> None:
    tail = Tail(((1, 2, 3, 4),))
    tail.add((9, 9, 1))
    tail.add(())
    tail.add((2, 3))
    assert list(tail.completing()) == [4]
    tail.add((9, 1, 2, 3))
    assert list(tail.completing()) == [4]
    tail.add((1,))
    assert list(tail.completing()) == []


def test_the_prompt_completes_no_word_and_output_generated_before_does() -> None:
    """A request that goes on from another group's output: `PROMPT` and one token of output are its inputs."""
    for border, expected in ((len(PROMPT), 5), (2, 4)):
        state = SamplingState()
        sampling = RequestSampling(temperature=0.0, bad_words=((3, 5), (2, 3, 5)), num_prompt_tokens=border)
        row = PlanRow(0, 1, 0, len(PROMPT), PROMPT, need_sample=True)
        plan = StepPlan(0, 0, (SlotFill(0, 1, sampling),), (row,), len(PROMPT), -1, feedback_posted=True, dummy=False)
        state.accept(plan)
        drawn, _ = state.sample(plan, torch.arange(VOCAB_SIZE, dtype=torch.float32)[None])
        (sampled,) = drawn.rows()
        assert sampled.token == expected
