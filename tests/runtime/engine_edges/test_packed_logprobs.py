"""Packed log probabilities come out digit for digit as they went in, in order, however they are put in and taken."""

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from stageline_runtime.engine.text.packed_logprobs import ListedToken, PackedLogprobs
from stageline_runtime.engine.text.token_bytes import TokenBytes
from stageline_runtime.plan_bus.messages import TokenLogprobs

IDS = st.integers(0, 2**31 - 1)
VALUES = st.floats(allow_nan=False)
TOKENS = st.tuples(IDS, st.builds(TokenLogprobs, VALUES, st.lists(st.tuples(IDS, VALUES), max_size=21).map(tuple)))


@given(st.lists(st.tuples(st.lists(TOKENS, max_size=4), st.integers(0, 6)), max_size=8))
def test_they_come_out_as_they_went_in(turns: list[tuple[list[ListedToken], int]]) -> None:
    packed = PackedLogprobs(TokenBytes(Tokenizer(models.BPE())))
    added: list[ListedToken] = []
    taken: list[ListedToken] = []
    for tokens, count in turns:
        packed.add(tokens)
        added += tokens
        taken += packed.take(min(count, len(packed)))
        assert len(packed) == len(added) - len(taken)
    taken += packed.take(len(packed))
    assert taken == added
    assert len(packed) == 0
