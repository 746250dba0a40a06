"""Shares, quantiles and rates between two scrapes, against figures worked out by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline_cli.on_call.facts.activity import (
    draft_figures,
    histogram_quantile,
    pipeline_facts,
    stage_activity,
    traffic_facts,
)
from stageline_cli.on_call.facts.samples import Samples, parse_samples
from stageline_gateway.telemetry import metric_names as gateway
from stageline_runtime import metric_names as runtime


def stage_page(busy: float, dummy: float, recv: float, idle: float) -> Samples:
    return parse_samples(
        f'{runtime.STAGE_BUSY.name}{{kind="decode"}} {busy}\n'
        f'{runtime.STAGE_BUSY.name}{{kind="dummy"}} {dummy}\n'
        f'{runtime.STAGE_WAIT.name}{{reason="recv"}} {recv}\n'
        f"{runtime.STAGE_IDLE.name} {idle}\n"
        f"{runtime.STAGE_WALL.name} {busy + dummy + recv + idle}\n"
    )


def gateway_page(ok: int, failed: int, tokens: int, fast: int, slow: int) -> Samples:
    label = 'model_name="tiny"'
    return parse_samples(
        f'{gateway.REQUESTS.name}{{{label},code="200"}} {ok}\n'
        f'{gateway.REQUESTS.name}{{{label},code="503"}} {failed}\n'
        f'{gateway.REQUESTS.name}{{model_name="other",code="500"}} 999\n'
        f"{gateway.GENERATION_TOKENS.name}{{{label}}} {tokens}\n"
        f'{gateway.TIME_TO_FIRST_TOKEN.name}_bucket{{{label},le="0.1"}} {fast}\n'
        f'{gateway.TIME_TO_FIRST_TOKEN.name}_bucket{{{label},le="0.2"}} {fast + slow}\n'
        f'{gateway.TIME_TO_FIRST_TOKEN.name}_bucket{{{label},le="+Inf"}} {fast + slow}\n'
        f"{gateway.IN_FLIGHT.name}{{{label}}} 3\n"
    )


def test_a_stage_s_shares_and_bubble() -> None:
    found = stage_activity(stage_page(1, 0, 1, 8), stage_page(4, 1, 3, 10))
    assert found is not None
    shares = (found.busy_share, found.dummy_share, found.wait_share, found.idle_share)
    assert shares == pytest.approx((0.5, 0.125, 0.25, 0.25))
    assert found.wait_share_by_reason == pytest.approx({"recv": 0.25})
    assert found.bubble == pytest.approx((2 + 1) / (4 + 2))
    assert found.seconds == pytest.approx(8)


def test_an_idle_stage_has_no_bubble() -> None:
    found = stage_activity(stage_page(1, 0, 1, 8), stage_page(1, 0, 1, 18))
    assert found is not None
    assert (found.idle_share, found.bubble) == (1.0, None)


def test_counters_that_began_anew_say_nothing() -> None:
    assert stage_activity(stage_page(10, 0, 10, 80), stage_page(1, 0, 1, 8)) is None
    assert stage_activity(stage_page(10, 0, 1, 8), stage_page(1, 0, 1, 80)) is None


def engine_page(drafted: int, held: int, rows: int) -> Samples:
    label = 'model_name="tiny"'
    return parse_samples(
        f"{runtime.DRAFT_TOKENS.name}{{{label}}} {drafted}\n"
        f"{runtime.ACCEPTED_TOKENS.name}{{{label}}} {held}\n"
        f"{runtime.DRAFTED_ROWS.name}{{{label}}} {rows}\n"
    )


def test_drafts_of_the_time_between_two_readings() -> None:
    assert draft_figures(engine_page(100, 90, 10), engine_page(140, 120, 20)) == (0.75, 4.0)
    assert draft_figures(engine_page(100, 90, 10), engine_page(110, 90, 20)) == (0.0, 1.0)


def test_no_drafts_and_counters_that_began_anew_say_nothing_of_drafts() -> None:
    assert draft_figures(engine_page(5, 5, 2), engine_page(5, 5, 2)) == (None, None)
    assert draft_figures(parse_samples(""), parse_samples("")) == (None, None)
    assert draft_figures(engine_page(100, 90, 10), engine_page(4, 3, 1)) == (None, None)


def test_the_busiest_stage_is_the_bottleneck() -> None:
    before = stage_page(0, 0, 0, 0)
    stages = {0: stage_activity(before, stage_page(2, 0, 8, 0)), 1: stage_activity(before, stage_page(8, 0, 2, 0))}
    found = pipeline_facts({stage: one for stage, one in stages.items() if one is not None})
    assert found is not None
    assert found.bottleneck_stage == 1
    assert found.bottleneck_share == pytest.approx(0.8)
    assert found.imbalance == pytest.approx(0.8 / 0.5)
    assert found.bubble == pytest.approx(0.5)


def test_a_model_s_traffic_counts_its_own_answers_over_all_gateways() -> None:
    pairs = [
        (gateway_page(10, 0, 100, 5, 5), gateway_page(18, 1, 300, 9, 9)),
        (gateway_page(0, 0, 0, 0, 0), gateway_page(1, 0, 100, 1, 0)),
    ]
    found = traffic_facts(pairs, 2.0, "tiny")
    assert found is not None
    assert (found.requests_per_second, found.tokens_per_second, found.in_flight) == (5.0, 150.0, 6)
    assert found.error_ratio == pytest.approx(1 / 10)
    assert found.first_token is not None
    assert found.first_token.p50_seconds == pytest.approx(0.1 * 4.5 / 5)
    assert found.first_token.p95_seconds == pytest.approx(0.1 + 0.1 * (0.95 * 9 - 5) / 4)
    assert found.output_token is None


@pytest.mark.parametrize(("namespace", "tokens"), [("here", 100), ("there", 7)])
def test_of_a_gateway_of_several_namespaces_a_model_counts_its_own_and_not_its_namesakes(
    namespace: str, tokens: int
) -> None:
    name = gateway.GENERATION_TOKENS.name
    page = parse_samples(
        f'{name}{{model_name="tiny",namespace="here"}} 100\n{name}{{model_name="tiny",namespace="there"}} 7\n'
    )
    assert page.of_namespace(namespace).total(name, model_name="tiny") == tokens
    alone = parse_samples(f'{name}{{model_name="tiny",namespace=""}} 5\n')
    assert alone.of_namespace(namespace).total(name, model_name="tiny") == 5, "on one machine none is named"


def test_a_gateway_that_began_anew_says_nothing() -> None:
    assert traffic_facts([(gateway_page(10, 0, 100, 5, 5), gateway_page(1, 0, 10, 1, 0))], 2.0, "tiny") is None


@given(st.lists(st.integers(0, 50), min_size=2, max_size=8), st.floats(0.01, 0.99))
def test_a_quantile_lies_in_the_bucket_that_holds_it(counts: list[int], share: float) -> None:
    bounds = [float(index + 1) for index in range(len(counts) - 1)] + [math.inf]
    cumulative = {bound: float(sum(counts[: index + 1])) for index, bound in enumerate(bounds)}
    found = histogram_quantile(share, cumulative)
    if not sum(counts):
        assert found is None
        return
    assert found is not None
    holding = next(index for index, bound in enumerate(bounds) if cumulative[bound] >= share * sum(counts))
    lower = bounds[holding - 1] if holding else 0.0
    upper = bounds[holding] if math.isfinite(bounds[holding]) else lower
    assert lower <= found <= upper or found == pytest.approx(lower)
