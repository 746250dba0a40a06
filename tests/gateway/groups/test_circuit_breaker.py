"""The circuit breaker: its states as a table, and what holds in any history of requests."""

from contextlib import ExitStack, suppress

from hypothesis import given
from hypothesis import strategies as st

from stageline_gateway.groups.backends import CLOSED, Backends, BreakerPolicy, CircuitBreaker, DiscoveredGroups

POLICY = BreakerPolicy(failures_to_open=3, cool_down_seconds=1.0, longest_cool_down_seconds=5.0, trial_seconds=2.0)


def test_three_failures_in_a_row_open_it_and_a_token_between_them_starts_over() -> None:
    circuit = CLOSED
    for _ in range(2):
        circuit = circuit.failed(0.0, POLICY)
        assert circuit.admits(0.0)
    assert circuit.answered().failed(0.0, POLICY).failed(0.0, POLICY).admits(0.0)
    opened = circuit.failed(0.0, POLICY)
    assert not opened.admits(0.999)
    assert opened.admits(1.0)


def test_an_engine_that_can_not_be_reached_opens_it_at_once() -> None:
    assert not CLOSED.failed(0.0, POLICY, at_once=True).admits(0.5)


def test_one_request_is_let_through_on_trial() -> None:
    opened = CLOSED.failed(0.0, POLICY, at_once=True)
    on_trial = opened.started(1.0, POLICY)
    assert not on_trial.admits(1.5), "another one waits for what the trial shows"
    assert on_trial.answered() == CLOSED
    again = on_trial.failed(1.5, POLICY)
    assert not again.admits(3.4)
    assert again.admits(3.5), "twice the cool-down"


def test_a_trial_that_shows_nothing_holds_the_others_for_its_time_and_no_longer() -> None:
    on_trial = CLOSED.failed(0.0, POLICY, at_once=True).started(1.0, POLICY)
    assert not on_trial.admits(2.999)
    assert on_trial.admits(3.0), "a model's only group must not wait for one long request"
    second = on_trial.started(3.0, POLICY)
    assert not second.admits(4.9), "one in that time and no more"
    failed = second.failed(3.5, POLICY)
    assert failed.cooled_at_seconds == 5.5, "either trial may decide, the first one too"
    assert failed.failed(4.0, POLICY).cooled_at_seconds == 5.5, "but not both"


def test_an_engine_in_doubt_gets_one_request_in_a_trials_time_however_soon_clients_leave() -> None:
    now = [0.0]
    backends = Backends(DiscoveredGroups("test"), policy=POLICY, clock=lambda: now[0])
    backends.set_breaker("a", CLOSED.failed(0.0, POLICY, at_once=True))
    let_through: list[float] = []
    while now[0] < 10:
        if backends.breaker_of("a").admits(now[0]):
            with suppress(GeneratorExit), backends.trial("a"):
                let_through.append(now[0])
                raise GeneratorExit  # its client leaves at once
        now[0] += 0.25
    assert let_through == [1.0, 3.0, 5.0, 7.0, 9.0]


def test_a_request_from_before_the_opening_ends_no_trial() -> None:
    now = [0.0]
    backends = Backends(DiscoveredGroups("test"), policy=POLICY, clock=lambda: now[0])
    with ExitStack() as running:
        running.enter_context(backends.trial("a"))
        backends.set_breaker("a", backends.breaker_of("a").failed(0.0, POLICY, at_once=True))
        now[0] = 1.0
        with backends.trial("a"):
            running.close()
            assert not backends.breaker_of("a").admits(1.5)


def test_the_cool_down_doubles_up_to_its_limit() -> None:
    circuit, now, waits = CLOSED, 0.0, []
    for _ in range(6):
        circuit = circuit.failed(now, POLICY, at_once=True)
        waits.append(circuit.cooled_at_seconds - now)
        now = circuit.cooled_at_seconds
    assert waits == [1.0, 2.0, 4.0, 5.0, 5.0, 5.0]


def test_requests_that_were_under_way_when_it_opened_do_not_lengthen_the_cool_down() -> None:
    opened = CLOSED.failed(0.0, POLICY, at_once=True)
    for _ in range(50):
        opened = opened.failed(0.5, POLICY)
    assert opened.cooled_at_seconds == 1.0


STEPS = st.lists(st.tuples(st.sampled_from(["start", "answer", "fail", "pass"]), st.floats(0.0, 3.0)), max_size=60)


@given(STEPS)
def test_it_always_admits_again_and_never_rests_longer_than_the_limit(steps: list[tuple[str, float]]) -> None:
    circuit, now = CLOSED, 0.0
    for step, wait in steps:
        now += wait
        circuit = _after(circuit, step, now)
        assert circuit.shut_until_seconds <= now + POLICY.longest_cool_down_seconds
        assert circuit.admits(now + POLICY.longest_cool_down_seconds)
        assert circuit.is_closed == (circuit.openings == 0)
        if circuit.is_closed:
            assert circuit.failures < POLICY.failures_to_open


def _after(circuit: CircuitBreaker, step: str, now: float) -> CircuitBreaker:
    match step:
        case "start":
            return circuit.started(now, POLICY) if circuit.admits(now) else circuit
        case "answer":
            return circuit.answered()
        case "fail":
            return circuit.failed(now, POLICY)
        case _:
            return circuit
