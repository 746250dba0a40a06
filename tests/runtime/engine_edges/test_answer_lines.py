"""Lines of answers are what the types of the interface write, however they are written."""

from hypothesis import given
from hypothesis import strategies as st

from stageline_api.engine_http import Delta, TokenLogprob
from stageline_runtime.engine.edge.answer_lines import delta_json

TEXTS = st.text(st.characters(codec="utf-8")) | st.text(st.characters(max_codepoint=0x9F))
LOGPROBS = st.lists(
    st.builds(
        TokenLogprob,
        token_id=st.integers(0, 2**31),
        bytes=st.lists(st.integers(0, 255), max_size=4).map(tuple),
        logprob=st.floats(-100, 0),
        top_logprobs=st.just(()),
    ),
    max_size=3,
)


@given(TEXTS, st.lists(st.integers(0, 2**31)), LOGPROBS)
def test_a_delta_is_written_as_its_type_writes_it(text: str, ids: list[int], logprobs: list[TokenLogprob]) -> None:
    delta = Delta(text=text, token_ids=tuple(ids), logprobs=tuple(logprobs))
    line = delta_json(text, ids, logprobs)
    assert line == delta.model_dump_json()
    assert Delta.model_validate_json(line) == delta
    assert "\n" not in line
