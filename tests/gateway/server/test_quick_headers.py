"""Headers that are looked up in one step say what starlette's say."""

from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from stageline_gateway.endpoints.direct_routes import QuickHeaders

NAMES = ("traceparent", "tracestate", "x-request-id", "content-type")
RAW = st.lists(st.tuples(st.sampled_from([name.encode() for name in NAMES]), st.binary(max_size=4)), max_size=6)


@given(RAW, st.sampled_from([*NAMES, "X-Request-Id", "not-there"]))
def test_they_say_what_starlette_says_of_any_name(raw: list[tuple[bytes, bytes]], name: str) -> None:
    quick, plain = QuickHeaders(raw), Headers(raw=raw)
    assert quick.get(name) == plain.get(name)
    assert quick.get(name, "else") == plain.get(name, "else")
    assert (name in quick) == (name in plain)
    assert quick.getlist(name) == plain.getlist(name)
    assert quick.items() == plain.items()
