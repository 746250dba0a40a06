"""Every query of every board against a real Prometheus that holds five scripted hours, and what the panels then say.

The numbers asserted are worked out by hand from the script (tests/support/boards/fleet_scenarios.py), not read from a
panel.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from board_builder.queries import events
from board_builder.requests import request_rate
from boards.backfilled_prometheus import BackfilledPrometheus, needs_prometheus, running_prometheus, write_blocks
from boards.board_answers import Answers, asked, asked_of, begin_of, prometheus_of_scenarios
from boards.board_queries import filled_in, queries_of
from boards.fleet_scenarios import SCENARIOS
from boards.scripted_services import STARTUP_SHARES
from stageline_api.health import Phase

pytestmark = needs_prometheus
BEFORE, DURING, BACK, END = 1740, 1980, 2100, 3600
"""Moments: a minute before it happens, while a lost stage is away, when it is back, and the last one."""
NOT_NARROWED = {"Firing alerts", "annotation Firing alerts"}
"""Shown whatever is chosen: they may be why one is looking."""
LOADING, READY = (list(Phase).index(phase) for phase in (Phase.LOADING, Phase.READY))
"""Phases are shown by their place in the usual order."""
LOOKED_BACK_SECONDS = 300
"""How long Prometheus goes on showing a series that ended; a past that is written can't say that it did."""


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackfilledPrometheus]:
    with prometheus_of_scenarios(tmp_path_factory.mktemp("scenarios")) as running:
        yield running


@pytest.fixture(scope="module")
def answers(prometheus: BackfilledPrometheus) -> Answers:
    return asked(prometheus)


def test_every_query_has_something_to_say_in_some_scenario(answers: Answers) -> None:
    said: defaultdict[tuple[str, str, str], set[str]] = defaultdict(set)
    for (scenario, query), series in answers.series.items():
        said[query.board, query.title, query.ref] |= {scenario} if series else set()
    assert [query for query, scenarios in said.items() if not scenarios] == []


def test_no_panel_ever_shows_a_number_that_is_none(answers: Answers) -> None:
    """0 / 0 is no data, and nothing takes forever."""
    strange = [
        (scenario, query.board, query.title, value)
        for (scenario, query), series in answers.series.items()
        for each in series
        for _, value in each["values"]
        if not math.isfinite(float(value))
    ]
    assert strange == []


def test_every_legend_is_filled_in(answers: Answers) -> None:
    """A label that the series don't have would leave a hole in their names."""
    holes = {
        (query.board, query.title, label)
        for (_, query), series in answers.series.items()
        for label in re.findall(r"\{\{(\w+)\}\}", query.legend)
        for each in series
        if label not in each["metric"]
    }
    assert holes == set()


@pytest.mark.parametrize(
    ("board", "chosen"),
    [
        ("fleet", {"namespace": "models", "model_name": "mini"}),
        ("gateway", {"namespace": "models", "model_name": "mini"}),
        ("operator", {"namespace": "models", "model": "mini"}),
        ("pipeline", {"namespace": "models", "model": "mini", "group": "0"}),
    ],
)
def test_a_choice_leaves_out_what_was_not_chosen(
    prometheus: BackfilledPrometheus, board: str, chosen: dict[str, str]
) -> None:
    """In the scenario in which chat has the failures, the retries and the alerts."""
    said = asked_of(board, "stage-lost", prometheus, chosen, step=600)
    others = {
        (query.title, str(each["metric"]))
        for (_, query), series in said.series.items()
        for each in series
        if "chat" in each["metric"].values() and query.title not in NOT_NARROWED
    }
    assert others == set()


# -- healthy: 4 requests a second of chat, 1 of mini; stage 1 of chat takes 25 ms a step where the others take 20 ----


def test_healthy_users_are_shown_as_well(answers: Answers) -> None:
    assert answers.at(END, "healthy", "fleet", "Request rate")[""] == pytest.approx(5.1, rel=0.01)
    assert answers.at(END, "healthy", "fleet", "Error ratio") == {"": 0}
    assert answers.at(END, "healthy", "fleet", "Groups not ready") == {"": 0}
    assert answers.at(END, "healthy", "fleet", "Highest burn rate")[""] == pytest.approx(0, abs=1e-9)
    assert answers.at(END, "healthy", "fleet", "Firing alerts") == {}
    assert answers.at(END, "healthy", "operator", "Leaders") == {"": 1}
    assert answers.at(END, "healthy", "operator", "Models not ready") == {"": 0}
    assert answers.at(END, "healthy", "gateway", "Groups by readiness") == {
        "chat true": 2, "chat false": 0, "mini true": 1, "mini false": 0,
    }  # fmt: skip


def test_a_quantile_is_that_of_the_scripted_samples(answers: Answers) -> None:
    """Of chat's first tokens 95 % take 0.5 s at most and all 0.75: the 99th of 100 lies four fifths between."""
    assert answers.at(END, "healthy", "pipeline", "TTFT p99")[""] == pytest.approx(0.5 + 0.25 * 4 / 5)
    by_model = answers.at(END, "healthy", "fleet", "Models", "C")
    assert by_model["chat"] == pytest.approx(0.7)


def test_shares_of_a_stages_time_are_those_of_the_script(answers: Answers) -> None:
    """Load 0.6, so that stage 1 is busy 60 % and the others four fifths of that; there is work for 90 % of the time."""
    place = "Stage time: busy, wait, idle"
    busy, wait, idle = (answers.at(END, "healthy", "pipeline", place, ref) for ref in "ABC")
    assert sorted(busy) == ["0/00", "0/01", "0/02", "1/00", "1/01", "1/02"], "groups and stages in order"
    assert [busy["0/00"], busy["0/01"]] == pytest.approx([0.48, 0.6])
    assert [wait["0/00"], wait["0/01"]] == pytest.approx([0.42, 0.3])
    assert idle["0/02"] == pytest.approx(0.1)
    uneven = answers.at(END, "healthy", "pipeline", "Imbalance by stage")
    assert [uneven["0 chat 00"], uneven["0 chat 01"]] == pytest.approx([0.48 / 0.52, 0.6 / 0.52])
    assert answers.at(END, "healthy", "pipeline", "Bubble")["0 chat"] == pytest.approx(1.14 / 2.7)


def test_the_rank_that_waits_least_is_seen_as_the_slow_one(answers: Answers) -> None:
    """Rank 0 spends a tenth of its busy time in exchanges and rank 1 three, of stages that are busy 48 and 60 %."""
    exchanged = answers.at(END, "healthy", "pipeline", "Exchange share by rank")
    computed = answers.at(END, "healthy", "pipeline", "Compute by rank")
    memory = answers.at(END, "healthy", "pipeline", "Memory by rank")
    stage = {name: (exchanged[name], computed[name], memory[name]) for name in ("0 chat 0 01", "0 chat 1 01")}
    assert stage["0 chat 0 01"] == pytest.approx((0.1, 0.54, 1.5e9)), sorted(exchanged)
    assert stage["0 chat 1 01"] == pytest.approx((0.3, 0.42, 1.5e9))


def test_drafts_are_those_of_the_script(answers: Answers) -> None:
    """Chat's groups verify five rows of four drafts a second, of which three hold; mini drafts nothing."""
    assert answers.at(END, "healthy", "pipeline", "Draft acceptance ratio") == pytest.approx(
        {"0 chat": 0.75, "1 chat": 0.75}
    )
    assert answers.at(END, "healthy", "pipeline", "Accepted length")["1 chat"] == pytest.approx(3.0)
    drafted, accepted = (answers.at(END, "healthy", "pipeline", "Draft tokens", ref)["0 chat"] for ref in "AB")
    assert (drafted, accepted) == pytest.approx((20.0, 15.0))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_stacked_shares_of_a_stage_fill_its_time(answers: Answers, scenario: str) -> None:
    parts = [answers.at(END, scenario, "pipeline", "Stage time: busy, wait, idle", ref) for ref in "ABC"]
    assert len(parts[0]) == 6
    for place in parts[0]:
        assert sum(part[place] for part in parts) == pytest.approx(1.0, abs=0.01), place


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_stages_own_panel_shows_shares_also_of_several_groups(answers: Answers, scenario: str) -> None:
    parts = [answers.at(END, scenario, "pipeline", "Stage $stage", ref) for ref in "ABC"]
    assert sum(sum(part.values()) for part in parts) == pytest.approx(1.0, abs=0.01)


# -- slow stage: stage 1 of chat's group 0 takes 100 ms a step, load 0.98 --------------------------------------------


def test_the_slow_stage_is_named_on_the_first_board(answers: Answers) -> None:
    title = "Busiest stage of each group"
    busy, times_the_mean, bubble = (answers.at(END, "slow-stage", "fleet", title, ref) for ref in "ABC")
    assert busy["0 chat 01"] == pytest.approx(0.98)
    assert times_the_mean["0 chat 01"] == pytest.approx(0.98 / ((0.98 + 0.196 * 2) / 3))
    assert bubble["0 chat 01"] == pytest.approx(0.02)
    assert {name for name in busy if name.startswith("0 chat")} == {"0 chat 01"}, "one row for the group"
    alerts = answers.at(END, "slow-stage", "fleet", "Firing alerts")
    assert list(alerts) == ["StagelineStageBottleneck 0 chat chat warning 01"]


def test_the_slow_stage_stands_out_on_its_pipelines_board(answers: Answers) -> None:
    assert answers.at(END, "slow-stage", "pipeline", "Bottleneck")["0 chat 01"] == pytest.approx(0.98)
    assert answers.at(END, "slow-stage", "pipeline", "Imbalance")["0 chat 01"] == pytest.approx(2.143, abs=0.001)
    uneven = answers.at(END, "slow-stage", "pipeline", "Imbalance by stage")
    assert [round(uneven[f"0 chat 0{stage}"], 3) for stage in range(3)] == [0.429, 2.143, 0.429]
    assert uneven["1 chat 00"] == pytest.approx(0.48 / 0.52, abs=0.001), "the other group goes on as before"
    before = answers.at(BEFORE, "slow-stage", "pipeline", "Imbalance")
    assert before["0 chat 01"] == pytest.approx(0.6 / 0.52)
    assert answers.at(END, "slow-stage", "pipeline", "Decode step time, p50 and p99", "B")["0 chat 01"] > 0.08
    assert answers.at(END, "slow-stage", "pipeline", "Requests waiting in engines") == {"": 6}
    waits = answers.at(END, "slow-stage", "pipeline", "Stage wait by reason")
    assert waits["0 chat feedback 00"] == waits["0 chat recv 02"] == pytest.approx(0.804)


def test_a_slow_stage_spends_its_models_budget_and_no_others(answers: Answers) -> None:
    """5 % of first tokens take 3 s for half of the hour, where 1 % may take more than 2."""
    burn = answers.at(END, "slow-stage", "fleet", "TTFT: burn rate")
    assert burn["chat"] == pytest.approx(2.5, rel=0.05)
    assert burn["mini"] == pytest.approx(0, abs=1e-9)
    first, failures = (answers.at(END, "slow-stage", "fleet", "Error budgets by model", ref) for ref in "AE")
    assert first["chat"] == burn["chat"]
    assert failures == {"chat": 0, "mini": 0}
    assert answers.at(END, "slow-stage", "pipeline", "TTFT p99", "B")[""] == pytest.approx(2 + 2 * 4 / 5)


# -- stage lost: group 0 of chat is away for five minutes and comes back as incarnation 2 -----------------------------


def test_a_lost_stage_shows_in_errors_and_groups(answers: Answers) -> None:
    """Of 4 requests a second that are no client's fault 0.2 get 502, and 0.1 answers break off."""
    errors = answers.at(DURING, "stage-lost", "fleet", "Models", "B")
    assert errors == {"chat": pytest.approx(0.3 / 4), "mini": 0}
    assert answers.at(DURING, "stage-lost", "fleet", "Models", "F") == {"chat": 1, "mini": 1}
    assert answers.at(DURING, "stage-lost", "fleet", "Models", "G") == {"chat": 2, "mini": 1}
    assert answers.at(DURING, "stage-lost", "fleet", "Groups not ready") == {"": 1}, "one that no gateway knows of"
    assert answers.at(DURING, "stage-lost", "gateway", "Resumed requests")["chat resumed"] > 10
    stages = answers.at(DURING, "stage-lost", "operator", "Stages not ready")
    assert list(stages) == [f"0 chat Starting 0{stage}" for stage in range(3)]
    failures = answers.at(BEFORE + 120, "stage-lost", "fleet", "Group failures")
    assert failures == {"Killed chat": 1}
    assert answers.at(END, "stage-lost", "fleet", "Group failures") == {}
    assert answers.at(END, "stage-lost", "fleet", "Error ratio")[""] == pytest.approx(0, abs=1e-9)


def test_a_group_without_pods_has_no_bubble_rather_than_none_at_all(answers: Answers) -> None:
    bubble = answers.at(DURING, "stage-lost", "pipeline", "Bubble")
    assert "0 chat" not in bubble
    assert bubble["1 chat"] == pytest.approx((0.05 + 2 * 0.24) / 3)
    assert answers.at(END, "stage-lost", "pipeline", "Bubble")["0 chat"] == pytest.approx(1.14 / 2.7)


def test_the_new_incarnation_is_marked_once(answers: Answers) -> None:
    board = "pipeline"
    marks = answers.of("stage-lost", board, "annotation Groups formed anew")
    assert [each["metric"] for each in marks] == [{"namespace": "models", "model": "chat", "group": "0"}]
    times = [moment - begin_of("stage-lost") for moment, _ in marks[0]["values"]]
    assert times == [BACK, BACK + 60]
    assert answers.at(BEFORE, "stage-lost", board, "Incarnation") == {"0 chat": 1, "1 chat": 1}
    assert answers.at(END, "stage-lost", board, "Incarnation") == {"0 chat": 2, "1 chat": 1}
    phases = answers.at(BACK, "stage-lost", board, "Stage phase")
    assert phases == {f"0 0{stage}": LOADING for stage in range(3)} | {f"1 0{stage}": READY for stage in range(3)}
    rollouts = answers.of("stage-lost", board, "annotation Rollouts")
    begun, *_, ended = [moment - begin_of("stage-lost") for moment, _ in rollouts[0]["values"]]
    assert (begun, ended <= 2790 + LOOKED_BACK_SECONDS) == (2700, True)
    recovered = answers.at(BACK + 60, "stage-lost", "operator", "Group recovery time")
    assert 180 < recovered[""] <= 300


# -- saturated: 2 of 8 requests a second get 503 and 1 more 429; engines are full ------------------------------------


def test_saturation_shows_as_refusals_queues_and_a_full_cache(answers: Answers) -> None:
    assert answers.at(END, "saturated", "pipeline", "Error ratio")[""] == pytest.approx(2 / 8), "429 is its key's limit"
    assert answers.at(END, "saturated", "fleet", "Requests waiting") == {"": 60}
    assert answers.at(END, "saturated", "pipeline", "Requests waiting in engines") == {"": 80}
    assert answers.at(END, "saturated", "pipeline", "KV cache usage") == {"0": 0.99, "1": 0.99}
    assert answers.at(END, "saturated", "pipeline", "TTFT p99", "B")[""] == pytest.approx(15 + 15 * 4 / 5)
    assert answers.at(END, "saturated", "pipeline", "Preemptions")["0 chat"] == pytest.approx(0.2)
    refused = answers.at(END, "saturated", "gateway", "Requests rejected by limits")
    assert refused == {"team-a rate_limit_exceeded": pytest.approx(1.0)}
    bottleneck = answers.at(END, "saturated", "pipeline", "Bottleneck")
    assert bottleneck == {"0 chat 01": pytest.approx(0.99), "1 chat 01": pytest.approx(0.99)}
    assert answers.at(END, "saturated", "pipeline", "Bubble")["0 chat"] == pytest.approx((0.01 + 2 * 0.208) / 3)


# -- no traffic: chat's ends after half an hour, mini never had any --------------------------------------------------


@pytest.mark.parametrize(
    ("board", "title"),
    [
        ("fleet", "Error ratio"),
        ("fleet", "TTFT p99"),
        ("fleet", "TPOT p99"),
        ("fleet", "TTFT (time to first token)"),
        ("fleet", "Bubble by group"),
        ("pipeline", "Bubble"),
        ("pipeline", "Bottleneck"),
        ("pipeline", "Imbalance"),
        ("pipeline", "Imbalance by stage"),
        ("pipeline", "Decode step time, p50 and p99"),
        ("pipeline", "Batch size"),
        ("pipeline", "Prefix cache hit ratio"),
        ("gateway", "Error ratio"),
        ("gateway", "E2E latency"),
    ],
)
def test_where_nothing_happens_there_is_no_data(answers: Answers, board: str, title: str) -> None:
    assert answers.at(END, "no-traffic", board, title) == {}
    assert answers.at(BEFORE, "no-traffic", board, title) != {}


def test_quiet_is_shown_as_quiet(answers: Answers) -> None:
    assert answers.at(END, "no-traffic", "fleet", "Request rate") == {"": 0}
    assert answers.at(END, "no-traffic", "fleet", "Models", "F") == {"chat": 2, "mini": 1}, "groups are there"
    assert answers.at(BEFORE, "no-traffic", "fleet", "Models", "B") == {"chat": 0}, "of mini there is no ratio"
    idle = answers.at(END, "no-traffic", "pipeline", "Stage time: busy, wait, idle", "C")
    assert idle == {place: pytest.approx(1.0) for place in idle}


# -- all others, one number each, worked out from the script ----------

TABLE = [
    # scenario, second, board, title, query, labels, number
    ("healthy", 3600, "fleet", "Token throughput", "A", "", 5 * 80),
    ("healthy", 3600, "fleet", "Request rate by model", "A", "chat", 4.1),
    ("stage-lost", 1980, "fleet", "Error ratio by model", "A", "chat", 0.3 / 4),
    ("healthy", 3600, "fleet", "TPOT p99", "A", "", 0.08 + 0.02 * 4 / 5),
    ("healthy", 3600, "fleet", "TPOT (time per output token)", "E", "", 0.0518),
    ("healthy", 3600, "fleet", "TTFT (time to first token)", "E", "", 0.3108),
    ("healthy", 3600, "fleet", "E2E latency", "E", "", 4.3 * 1.036),
    ("slow-stage", 3600, "fleet", "TPOT (time per output token)", "E", "", (4 * 0.12 + 0.05) * 1.036 / 5),
    ("healthy", 3600, "fleet", "TTFT distribution", "A", "0.5", 0.95 * 5 * 120),
    ("healthy", 3600, "fleet", "TPOT distribution", "A", "+Inf", 5 * 120),
    ("healthy", 3600, "fleet", "E2E latency distribution", "A", "+Inf", 5 * 120),
    ("healthy", 3600, "fleet", "Busiest stage's utilization", "A", "0 chat", 0.6),
    ("slow-stage", 3600, "fleet", "Bubble by group", "A", "0 chat", 1.628 / 3),
    ("healthy", 3600, "fleet", "Models by readiness", "A", "True", 2),
    ("healthy", 3600, "fleet", "Groups by phase", "A", "Ready", 3),
    ("stage-lost", 1980, "operator", "Groups by phase", "A", "BackingOff", 1),
    ("healthy", 3600, "gateway", "Request rate by status", "A", "404", 0.1),
    ("saturated", 3600, "gateway", "Request rate by status", "A", "503", 2.0),
    ("healthy", 3600, "gateway", "Requests in flight", "A", "", 23),
    ("healthy", 3600, "gateway", "Stale configuration", "A", "", 0),
    ("healthy", 3600, "gateway", "Certificate expiry", "A", "", 60 * 86400),
    ("healthy", 3600, "gateway", "Discovery age", "A", "", 12),
    ("healthy", 3600, "gateway", "Token throughput", "B", "chat", 4 * 80),
    ("healthy", 3600, "gateway", "Token throughput by API key", "A", "team-a", 5 * 280),
    ("healthy", 3600, "gateway", "Requests in flight by model", "A", "chat", 20),
    ("stage-lost", 1980, "gateway", "Interrupted streams", "A", "chat", 0.1 * 120),
    ("stage-lost", 1980, "gateway", "Engine failures by kind", "A", "unreachable chat", 0.1 * 120),
    ("healthy", 3600, "gateway", "Versions", "A", "0.1.0", 2),
    ("healthy", 3600, "operator", "Longest reconcile", "A", "", 0.01),
    ("healthy", 3600, "operator", "Oldest watch", "A", "", 20),
    ("healthy", 3600, "operator", "Reconcile error ratio", "A", "", 0),
    ("healthy", 3600, "operator", "Reconciles by outcome", "A", "done", 1.96),
    ("healthy", 3600, "operator", "Reconcile duration", "E", "", 0.02 * 1.036),
    ("healthy", 3600, "operator", "API server requests", "A", "200 patch", 1.5),
    ("stage-lost", 2160, "operator", "Group startup time", "E", "", 270),
    ("stage-lost", 2160, "fleet", "Time to ready", "A", "warm", 270),
    ("stage-lost", 2160, "fleet", "Time to ready by phase", "A", "warm prepare", 270 * STARTUP_SHARES["prepare"]),
    ("stage-lost", 2160, "fleet", "Recovery time by cause", "A", "Internal", 300),
    ("stage-lost", 1860, "operator", "Group failures by class", "A", "Killed chat", 1),
    ("stage-lost", 3600, "operator", "Incarnations", "A", "0 chat", 2),
    ("stage-lost", 1980, "operator", "Models", "C", "chat", 1),
    ("healthy", 3600, "operator", "Models", "D", "chat", 5),
    ("slow-stage", 3600, "pipeline", "Stage utilization", "A", "0 chat 00", 0.196),
    ("slow-stage", 3600, "pipeline", "Bubble, measured and expected", "A", "0 chat chat", 1.628 / 3),
    ("slow-stage", 3600, "pipeline", "Bubble, measured and expected", "B", "0 chat chat", 1 - 1.4 / 3),
    ("saturated", 3600, "pipeline", "Bubble, measured and expected", "B", "0 chat chat", 1 - 2.6 / 3),
    ("healthy", 3600, "pipeline", "Step rate by kind", "A", "0 decode chat 01", 0.6 / 0.025 * 0.9),
    ("healthy", 3600, "pipeline", "Token throughput", "A", "0 chat 01", 0.6 / 0.025 * 4),
    ("healthy", 3600, "pipeline", "Bytes sent", "A", "0 chat 01 hidden", 0.6 / 0.025 * 4 * 1152),
    ("healthy", 3600, "pipeline", "Transfer latency, p50 and p99", "A", "0 chat 01", 0.00025 * (1 + 0.4 / 0.6)),
    ("healthy", 3600, "pipeline", "Batch size", "E", "", 4),
    ("healthy", 3600, "pipeline", "Running requests by cohort", "A", "2 0 chat", 4),
    ("healthy", 3600, "pipeline", "Requests running and waiting", "A", "0 chat", 12),
    ("healthy", 3600, "pipeline", "Plans in flight", "A", "0 chat", 3),
    ("healthy", 3600, "pipeline", "Request time: queue, prefill, decode", "C", "", 4.0 * 1.036),
    ("healthy", 3600, "pipeline", "Engine queue time", "E", "", 0.02 * 1.036),
    ("healthy", 3600, "pipeline", "KV cache usage by stage", "A", "0 chat 01", 0.4),
    ("healthy", 3600, "pipeline", "Prefix cache hit ratio", "A", "0 chat", 0.25),
    ("healthy", 3600, "pipeline", "Stages", "A", "0 01", 10),
    ("healthy", 3600, "pipeline", "Stages", "B", "0 01", 3e9),
    ("healthy", 3600, "pipeline", "Stages", "E", "0 01", 2 * 98304),
    ("stage-lost", 1860, "pipeline", "Group failures by class", "A", "Killed", 1),
    # A burn rate over an hour adds up rates of five minutes, one for each of its minutes. What happened in the last
    # four minutes is in fewer than five of those: two minutes' worth is still to come. The first four lack a beginning:
    # rates see half a sample before it, which takes 1.6 of 60 (samples a minute apart) or 1.8 (half a minute).
    # 61 scrapes are slow ones, half a minute apart; 30 % of requests take over 0.15 s a token where 1 % may.
    ("slow-stage", 3600, "fleet", "TPOT: burn rate", "A", "chat", 0.30 * (61 / 2 - 2) / (60 - 1.6) / 0.01),
    # Ten scrapes with failures. Their series begin with the first, of which a rate sees half.
    ("stage-lost", 3600, "fleet", "Errors: burn rate", "A", "chat", (0.2 * 9.5 + 0.1 * 10.5) / 4 / 2 / 58.2 / 0.001),
    ("healthy", 3600, "fleet", "Error budgets by model", "G", "chat", 2),
    ("healthy", 3600, "fleet", "Error budgets by model", "H", "mini", 0.15),
    ("healthy", 3600, "gateway", "Circuit breakers open", "A", "chat", 0),
    ("healthy", 3600, "gateway", "TTFT distribution", "A", "0.5", 0.95 * 5 * 120),
    ("healthy", 3600, "gateway", "Time to dispatch", "E", "", 0.003 * 1.036),
    ("healthy", 3600, "gateway", "ITL (inter-token latency)", "E", "", 0.05 * 1.036),
    ("healthy", 3600, "gateway", "Stale configuration by kind", "A", "", 0),
    ("healthy", 3600, "operator", "Work queue depth", "A", "", 0),
    ("healthy", 3600, "operator", "Reconcile errors by kind", "A", "ApiError", 0),
    ("healthy", 3600, "operator", "Reconcile duration distribution", "A", "+Inf", 2 * 120),
    ("healthy", 3600, "operator", "Watch age by resource", "A", "pods", 20),
    ("stage-lost", 1860, "operator", "Relist corrections", "A", "pods", 1),
    ("healthy", 3600, "pipeline", "Prefill step time, p99", "A", "0 chat 00", 0.02),
    ("healthy", 3600, "pipeline", "Step time distribution", "A", "+Inf", 6 * 24 * 120),
    ("healthy", 3600, "pipeline", "Feedback latency, p50 and p99", "A", "0", 0.001 + 0.0015 * 0.4 / 0.6),
    ("healthy", 3600, "pipeline", "Batch size distribution", "A", "+Inf", 2 * 24 * 120),
]


@pytest.mark.parametrize(
    ("scenario", "second", "board", "title", "query", "labels", "number"),
    TABLE,
    ids=[f"{row[2]}: {row[3]} {row[4]} ({row[0]})" for row in TABLE],
)
def test_a_panel_says_what_the_script_comes_to(
    answers: Answers, scenario: str, second: int, board: str, title: str, query: str, labels: str, number: float
) -> None:
    said = answers.at(second, scenario, board, title, query)
    assert said.get(labels) == pytest.approx(number, rel=0.02, abs=1e-9), said


def test_while_the_first_requests_are_being_answered_their_rate_is_0_and_not_unknown(tmp_path: Path) -> None:
    begin = 1_767_225_600
    labels = '{namespace="models",model_name="chat"}'
    lines = [f"stageline_gateway_requests_in_flight{labels} 80 {begin + second}" for second in range(0, 300, 15)]
    text = "\n".join(["# TYPE stageline_gateway_requests_in_flight gauge", *lines, "# EOF\n"])
    write_blocks([text], tmp_path / "data")
    with running_prometheus(tmp_path / "data") as prometheus:
        expr = request_rate((), 'model_name="chat"').replace("$__rate_interval", "1m")
        (found,) = prometheus.at(expr, begin + 240)
    assert float(found["values"][0][1]) == 0


def test_a_stage_whose_pod_ends_while_the_next_one_starts_is_in_the_phase_of_the_next(tmp_path: Path) -> None:
    begin, its = 1_767_225_600, 'namespace="models",model="chat",group="0",stage="1"'
    phases = {"chat-0-1-1": Phase.DRAINING, "chat-0-2-1": Phase.LOADING}
    lines = [
        f'stageline_stage_phase{{{its},pod="{pod}",phase="{phase}"}} {int(phase is own)} {begin + second}'
        for pod, own in phases.items()
        for phase in Phase
        for second in range(0, 300, 15)
    ]
    write_blocks(["\n".join(["# TYPE stageline_stage_phase gauge", *lines, "# EOF\n"])], tmp_path / "data")
    (query,) = [each for each in queries_of("pipeline") if each.title == "Stage phase"]
    every = dict.fromkeys(("cluster", "namespace", "model", "group"), ".*")
    with running_prometheus(tmp_path / "data") as prometheus:
        (found,) = prometheus.at(filled_in(query.expr, every), begin + 240)
    assert float(found["values"][0][1]) == LOADING


def test_models_of_one_name_in_two_clusters_have_a_row_each(tmp_path: Path) -> None:
    begin, its = 1_767_225_600, 'namespace="models",model="chat"'
    wanted = {"east": 2, "west": 3}
    told = [
        (f'stageline_operator_{name}{{cluster="{cluster}",{labels}}}', value)
        for cluster, groups in wanted.items()
        for name, labels, value in (
            ("model_info", its + ',model_name="chat"', 1),
            ("model_desired_replicas", its, groups),
        )
    ]
    lines = [f"{series} {value} {begin + second}" for series, value in sorted(told) for second in range(0, 300, 15)]
    kinds = ("model_desired_replicas", "model_info")
    text = "\n".join(
        line
        for kind in kinds
        for line in (
            f"# TYPE stageline_operator_{kind} gauge",
            *(each for each in lines if each.startswith(f"stageline_operator_{kind}{{")),
        )
    )
    write_blocks([text + "\n# EOF\n"], tmp_path / "data")
    (query,) = [each for each in queries_of("fleet") if (each.title, each.ref) == ("Models", "G")]
    every = dict.fromkeys(("cluster", "namespace", "model_name", "pipeline_model"), ".*")
    with running_prometheus(tmp_path / "data") as prometheus:
        found = prometheus.at(filled_in(query.expr, every), begin + 240)
    assert {each["metric"]["cluster"]: float(each["values"][0][1]) for each in found} == wanted


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((4, 4, 4, 4, 4, 4, 5, 5, 7, 7), 3),
        ((4, 4, 4, 4, 4, 5, 5, 5, 5, 5), None),
        ((4, 4, 4, 4, 4, 4, 0, 1, 1, 1), 1),
        ((None, None, None, None, None, None, 1, 1, 2, 2), 2),
    ],
    ids=["three", "before the window", "begun anew", "the first ones"],
)
def test_what_happened_in_a_window_is_counted_whole(
    values: tuple[int | None, ...], expected: int | None, tmp_path: Path
) -> None:
    """A sample each half minute, asked at the last one for what the two minutes before it brought."""
    begin = 1_767_225_600
    lines = [
        f'stageline_gateway_broken_answers_total{{namespace="models",model_name="chat"}} {value} {begin + 30 * at}'
        for at, value in enumerate(values)
        if value is not None
    ]
    text = "\n".join(["# TYPE stageline_gateway_broken_answers counter", *lines, "# EOF\n"])
    write_blocks([text], tmp_path / "data")
    expr = events(("model_name",), "stageline_gateway_broken_answers_total").replace("$__rate_interval", "2m")
    with running_prometheus(tmp_path / "data") as prometheus:
        found = [float(each["values"][0][1]) for each in prometheus.at(expr, begin + 270)]
    assert found == ([] if expected is None else [expected])
