"""The choice of a group, as a pure function."""

from hypothesis import given
from hypothesis import strategies as st

from gateway_harness import group
from stageline_gateway.routing import Ledger, Share, choose

GROUPS = st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 5), st.booleans()), max_size=6)


@given(GROUPS)
def test_the_choice_is_ready_allowed_and_least_loaded(rows: list[tuple[bool, int, int, bool]]) -> None:
    groups = [group(f"http://{i}", i, ready=ready) for i, (ready, *_) in enumerate(rows)]
    shares = {f"http://{i}": Share(outstanding, started) for i, (_, outstanding, started, _) in enumerate(rows)}
    excluded = {f"http://{i}" for i, row in enumerate(rows) if row[3]}
    chosen = choose(groups, shares, excluded)
    allowed = [g for g in groups if g.ready and g.url not in excluded]
    if chosen is None:
        assert allowed == []
    else:
        assert chosen in allowed
        assert shares[chosen.url].outstanding == min(shares[g.url].outstanding for g in allowed)


def test_a_lease_survives_the_group_it_was_taken_on() -> None:
    ledger = Ledger()
    with ledger.lease("http://a"):
        ledger.keep(())
        assert ledger.shares["http://a"].outstanding == 1
    ledger.keep(())
    assert ledger.shares == {}
