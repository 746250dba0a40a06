"""When groups are added and taken away, as a table of exact cases, and what holds for any load."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline_api.resource.life.autoscaling import AutoscalingSpec
from stageline_operator.planner.autoscaling import GroupLoad, Scaling, Surplus, decide

SPEC = AutoscalingSpec.model_validate({"minReplicas": 1, "maxReplicas": 8, "queueSeconds": 5, "scaleInSeconds": 300})
IDLE = GroupLoad(running=0, waiting=0, slots=8)
FULL = GroupLoad(running=8, waiting=0, slots=8)
LATE = GroupLoad(running=8, waiting=3, slots=8, longest_wait_seconds=6)
SOON = GroupLoad(running=8, waiting=3, slots=8, longest_wait_seconds=4)
KV_FULL = GroupLoad(running=2, waiting=3, slots=8, kv_usage=1.0, longest_wait_seconds=6)
CROWDED = GroupLoad(running=8, waiting=100, slots=8, longest_wait_seconds=30)


@pytest.mark.parametrize(
    ("replicas", "num_ready", "loads", "wanted"),
    [
        pytest.param(1, 1, [SOON], 1, id="nobody has waited long enough"),
        pytest.param(1, 1, [LATE], 2, id="one has waited, and there are more requests than slots"),
        pytest.param(1, 1, [KV_FULL], 2, id="slots are free, but what waits shows that the cache is not"),
        pytest.param(2, 1, [LATE], 2, id="a group is on its way that can run all of them"),
        pytest.param(2, 1, [CROWDED], 4, id="one is on its way, and many more could be filled: twice as many at most"),
        pytest.param(2, 2, [LATE, IDLE], 2, id="another group has room: a new one would not run them sooner"),
        pytest.param(2, 2, [LATE, FULL], 3, id="no group has room"),
        pytest.param(8, 8, [CROWDED] * 8, 8, id="there are as many as there may be"),
        pytest.param(6, 6, [CROWDED] * 6, 8, id="up to as many as there may be"),
        pytest.param(0, 0, [], 1, id="below the fewest"),
        pytest.param(9, 9, [CROWDED] * 9, 8, id="above the most"),
        pytest.param(3, 3, [], 3, id="no engine answers"),
        pytest.param(3, 0, [], 3, id="no group is ready"),
        pytest.param(3, 3, [LATE, FULL], 3, id="of two that answer one is late: three can run them"),
    ],
)
def test_groups_are_added_for_requests_that_wait_and_would_be_run(
    replicas: int, num_ready: int, loads: list[GroupLoad], wanted: int
) -> None:
    decided = decide(SPEC, replicas, num_ready, loads, None, 1000.0)
    assert decided.replicas == wanted, decided
    assert bool(decided.why) == (wanted != replicas), decided


def test_the_sentence_names_the_wait_and_the_rule() -> None:
    said = "a request has waited for 6 s (autoscaling.queueSeconds is 5), with 11 in all"
    assert decide(SPEC, 1, 1, [LATE], None, 0.0) == Scaling(2, said)


def after(*looks: tuple[float, list[GroupLoad]], replicas: int = 3, num_ready: int = 3) -> list[int]:
    """What was decided at each look, each with the surplus of the one before."""
    surplus: Surplus | None = None
    decided = []
    for now, loads in looks:
        scaling = decide(SPEC, replicas, num_ready, loads, surplus, now)
        surplus = scaling.surplus
        decided.append(scaling.replicas)
    return decided


HALF = GroupLoad(running=4, waiting=0, slots=8)


def test_groups_go_once_fewer_have_been_enough_for_long_enough() -> None:
    assert after((0, [IDLE] * 3), (299, [IDLE] * 3), (300, [IDLE] * 3)) == [3, 3, 1]


def test_as_many_stay_as_the_busiest_moment_needed() -> None:
    """Two groups of eight at 70 % run 11.2 requests; 8 are enough for one group only at 100 %."""
    assert after((0, [IDLE] * 3), (100, [HALF, HALF, IDLE]), (300, [IDLE] * 3)) == [3, 3, 2]


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param([FULL, FULL, IDLE], id="three are needed"),
        pytest.param([GroupLoad(1, 1, 8), IDLE, IDLE], id="one request waits"),
        pytest.param([IDLE, IDLE], id="an engine does not answer"),
        pytest.param([], id="no engine answers"),
    ],
)
def test_the_time_begins_anew_after_a_moment_in_which_fewer_were_not_surely_enough(moment: list[GroupLoad]) -> None:
    idle = [IDLE] * 3
    assert after((0, idle), (200, moment), (300, idle), (599, idle), (600, idle)) == [3, 3, 3, 3, 1]


def test_nothing_goes_while_a_group_is_on_its_way() -> None:
    assert after((0, [IDLE] * 2), (400, [IDLE] * 2), num_ready=2) == [3, 3]


def test_a_full_cache_counts_as_a_full_group() -> None:
    one = GroupLoad(running=1, waiting=0, slots=8, kv_usage=0.9)
    assert after((0, [one] * 3), (300, [one] * 3)) == [3, 3]


loads = st.builds(
    GroupLoad,
    running=st.integers(0, 20),
    waiting=st.integers(0, 500),
    slots=st.integers(1, 20),
    kv_usage=st.floats(0, 1),
    longest_wait_seconds=st.floats(0, 100),
)


@given(st.integers(0, 12), st.integers(0, 12), st.lists(loads, max_size=12), st.booleans())
def test_whatever_is_said_the_number_stays_between_its_bounds(
    replicas: int, num_ready: int, said: list[GroupLoad], has_waited: bool
) -> None:
    surplus = Surplus(0.0, 1) if has_waited else None
    decided = decide(SPEC, replicas, num_ready, said[:num_ready], surplus, 1000.0)
    assert SPEC.min_replicas <= decided.replicas <= SPEC.max_replicas
    within = SPEC.min_replicas <= replicas <= SPEC.max_replicas
    assert not within or decided.replicas <= 2 * replicas
    if within and decided.replicas < replicas:
        assert has_waited
        assert len(said) >= num_ready == replicas
        assert not any(load.waiting for load in said[:num_ready])
    assert (decided.replicas != replicas) == bool(decided.why)
