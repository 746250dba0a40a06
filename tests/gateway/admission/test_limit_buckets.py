"""Buckets over time: what they let in never exceeds what a minute's worth and the time allow."""

from hypothesis import given
from hypothesis import strategies as st

from stageline_gateway.admission.keys import WINDOW_SECONDS, KeyUse, Limits


def use_of(limits: Limits, now_seconds: float = 0.0) -> KeyUse:
    use = KeyUse()
    use.follow(limits, now_seconds)
    return use


@given(limit=st.integers(1, 50), gaps=st.lists(st.floats(0, 20), max_size=80))
def test_requests_let_in_fit_the_rate(limit: int, gaps: list[float]) -> None:
    limits = Limits.model_validate({"requestsPerMinute": limit})
    use, now, let_in = use_of(limits), 0.0, 0
    for gap in gaps:
        now += gap
        use.follow(limits, now)
        refused = use.exceeded()
        if refused is None:
            use.arrive()
            let_in += 1
        else:
            use.follow(limits, now + refused.retry_after_seconds + 1e-6)
            assert use.exceeded() is None, "trying again as late as told must help"
            now += refused.retry_after_seconds + 1e-6
        assert let_in <= limit + now * limit / WINDOW_SECONDS + 1e-6


@given(limit=st.integers(1, 1000), spent=st.lists(st.integers(0, 5000), max_size=20))
def test_debt_of_tokens_is_paid_back_before_anything_is_let_in(limit: int, spent: list[int]) -> None:
    limits = Limits.model_validate({"tokensPerMinute": limit})
    use, now = use_of(limits), 0.0
    for tokens in spent:
        use.spend(tokens, now)
        if (refused := use.exceeded()) is not None:
            now += refused.retry_after_seconds + 1e-6
            use.follow(limits, now)
            assert use.exceeded() is None
    [allowance] = use.allowances(limits, now)
    assert 0 <= allowance.remaining <= limit
    assert allowance.reset_seconds >= 0


def test_tokens_that_come_late_are_not_paid_by_the_time_before() -> None:
    """A request that waited for minutes and then gets many tokens leaves as much debt as one that got them at once."""
    limits = Limits.model_validate({"tokensPerMinute": 600})
    use = use_of(limits)
    use.spend(3000, 300.0)
    use.follow(limits, 300.0)
    refused = use.exceeded()
    assert refused is not None
    assert 240 <= refused.retry_after_seconds < 241


def test_new_limits_keep_what_was_used() -> None:
    use = use_of(Limits.model_validate({"requestsPerMinute": 10}))
    for _ in range(8):
        use.arrive()
    use.follow(Limits.model_validate({"requestsPerMinute": 5}), 0.0)
    assert use.exceeded() is not None
    use.follow(Limits.model_validate({"requestsPerMinute": 20}), 0.0)
    assert use.allowances(use.limits, 0.0)[0].remaining == 12
    use.follow(Limits(), 0.0)
    assert use.exceeded() is None
    assert use.allowances(use.limits, 0.0) == []
