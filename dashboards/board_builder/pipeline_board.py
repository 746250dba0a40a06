"""*Pipeline*: one model's stages in order. Which stage is the bottleneck, what do the others wait for, since when?"""

from typing import Final

from grafana_foundation_sdk.builders import timeseries
from grafana_foundation_sdk.builders.dashboard import Dashboard

from board_builder import links
from board_builder.annotations import firing_alerts, reformed_groups, rollouts
from board_builder.board import board
from board_builder.layout import Section, line, section
from board_builder.objectives import RED, over_budget
from board_builder.panels import COUNT, AnyPanel, Series, Text, judged, lines, number, rows_heatmap
from board_builder.pipeline_drafts import drafts
from board_builder.pipeline_lives import lives
from board_builder.pipeline_memory import capacity, cohorts
from board_builder.pipeline_ranks import ranks
from board_builder.pipeline_steps import steps
from board_builder.queries import current, in_order, quantile, rate_by, selected, sum_by
from board_builder.requests import ERRORS, FAILING, error_ratio, request_rate
from board_builder.stages import (
    BUSY,
    BUSY_COLORS,
    GROUP,
    STAGE,
    UNEVEN,
    WAIT_COLORS,
    bubble,
    busiest,
    busy,
    idle,
    imbalance,
    states,
)
from board_builder.tables import stacked_bars
from board_builder.variables import CLUSTER, choice, cluster_choice, datasource, hidden
from stageline_gateway.telemetry import metric_names as gateway
from stageline_operator.controller.telemetry import metric_names as operator
from stageline_runtime import metric_names as names

OF_MODEL: Final = ('cluster=~"$cluster",namespace=~"$namespace"', 'model=~"$model"')
OF_GROUP: Final = (*OF_MODEL, 'group=~"$group"')
ASKED_FOR: Final = ('cluster=~"$cluster",namespace=~"$namespace"', 'model_name=~"$asked_for"')
"""The gateway's label of a model is the name that clients send."""
STAGE_LEGEND: Final = "group {{group}} stage {{stage}}"


def pipeline_board() -> Dashboard:
    """One model at a time, and one, some or all of its groups."""
    layers = names.STAGE_LAYERS.name
    return board(
        links.PIPELINE,
        "Pipeline",
        "One model: its stages in order, the bottleneck, and what the others wait for.",
        (
            datasource(),
            cluster_choice(layers),
            choice(
                "namespace", "Namespace", "Namespaces with pipelines.", layers, "namespace", (CLUSTER,), multi=False
            ),
            choice("model", "Model", "PipelineModels.", layers, "model", OF_MODEL[:1], multi=False),
            choice("group", "Group", "Copies of the pipeline.", layers, "group", OF_MODEL),
            hidden("asked_for", "The name that clients ask for.", layers, "model_name", OF_MODEL),
            hidden("stage", "Stages, for the panels that are drawn once for each.", layers, "stage", OF_GROUP),
        ),
        (reformed_groups(*OF_MODEL), rollouts(*OF_MODEL), firing_alerts()),
        (
            _is_it_bad(),
            _which_stage(),
            _stage_by_stage(),
            steps(OF_GROUP),
            ranks(OF_GROUP),
            cohorts(OF_GROUP),
            drafts(OF_GROUP),
            capacity(OF_GROUP),
            lives(OF_MODEL, OF_GROUP),
        ),
    )


def _is_it_bad() -> Section:
    rate = Text("Request rate", "Requests for this model answered per second.", "reqps")
    errors = Text("Error ratio", f"Share of requests that failed. {ERRORS}", "percentunit")
    first = Text("TTFT p99", f"Time to first token: 99 of 100 requests had theirs within this time. {RED}", "s")
    token = Text(
        "TPOT p99",
        f"Time per output token: 99 of 100 requests were at least this fast, averaged over their tokens. {RED}",
        "s",
    )
    waiting_now = Text(
        "Requests waiting in engines",
        "Requests without a slot in a KV cache. Rising: the groups are full.",
        COUNT,
    )
    phases = Text("Groups by phase", "The model's groups by phase, as the operator sees them.", COUNT)
    ttft, tpot = gateway.TIME_TO_FIRST_TOKEN.name, gateway.TIME_PER_OUTPUT_TOKEN.name
    return section(
        "Overview",
        line(
            4,
            number(rate, request_rate((), *ASKED_FOR)),
            number(errors, error_ratio((), *ASKED_FOR), FAILING),
            judged(first, quantile(0.99, (), ttft, *ASKED_FOR), over_budget("TTFT", *ASKED_FOR)),
            judged(token, quantile(0.99, (), tpot, *ASKED_FOR), over_budget("TPOT", *ASKED_FOR)),
            number(waiting_now, sum_by((), selected(names.NUM_REQUESTS_WAITING.name, *OF_GROUP))),
            number(phases, current(("phase",), operator.GROUPS.name, *OF_MODEL) + " > 0", legend="{{phase}}"),
            widths=(3, 3, 3, 3, 6, 6),
        ),
    )


def _which_stage() -> Section:
    heat = Text(
        "Imbalance by stage",
        "One row per stage: its busy time as a multiple of its group's mean. Red: the others, which are blue, wait for "
        "this one. All yellow: an even pipeline. No color: nothing to do.",
        "none",
    )
    course = Text(
        "Stage utilization",
        "The share of time each stage computes. Lines apart from each other: uneven stages. The highest is the limit.",
        "percentunit",
    )
    return section(
        "Stages and bubble",
        line(
            9,
            _shares(),
            rows_heatmap(heat, Series(in_order(f"({imbalance(*OF_GROUP)})"), STAGE_LEGEND), 0.5, 1.5),
            lines(course, Series(in_order(busy(STAGE, *OF_GROUP)), STAGE_LEGEND), limits=BUSY),
        ),
        line(7, *_bottleneck(), _expected_bubble(), widths=(5, 4, 4, 11)),
    )


def _bottleneck() -> tuple[AnyPanel, ...]:
    bottleneck = Text(
        "Bottleneck",
        "The busiest stage of each group and the share of time it computes. Near 100 % the pipeline is at its limit, "
        "and this stage sets it.",
        "percentunit",
    )
    uneven = Text(
        "Imbalance",
        "The busiest stage's busy time as a multiple of the mean over its group. 1 is an even pipeline; from 1.25 on, "
        "divide the layers again or look for a slow node.",
        "none",
    )
    wasted = Text(
        "Bubble",
        "(wait + dummy) / (busy + wait) over all stages. With few requests it is large and harmless; while requests "
        "wait it is lost throughput.",
        "percentunit",
    )
    return (
        number(bottleneck, in_order(f"({busiest(busy(STAGE, *OF_GROUP), *OF_GROUP)})"), BUSY, STAGE_LEGEND),
        number(uneven, in_order(f"({busiest(imbalance(*OF_GROUP), *OF_GROUP)})"), UNEVEN, STAGE_LEGEND),
        number(wasted, bubble(GROUP, *OF_GROUP), legend="group {{group}}"),
    )


def _expected_bubble() -> AnyPanel:
    text = Text(
        "Bubble, measured and expected",
        "The bubble over five minutes, and what uneven stages and cohorts without requests must cost. Apart by 15 % or "
        "more while requests queue: time is lost between stages, to links, hosts or late plans.",
        "percentunit",
    )
    return lines(
        text,
        Series(selected("group:stageline_stage_bubble:ratio_rate5m", *OF_GROUP), "group {{group}}"),
        Series(selected("group:stageline_stage_bubble_expected:ratio_rate5m", *OF_GROUP), "group {{group}} expected"),
    )


def _shares() -> AnyPanel:
    text = Text(
        "Stage time: busy, wait, idle",
        "One bar per stage, group/stage, from first to last: computing, waiting while there is work, and idle. The bar "
        "with most busy is the bottleneck; the others wait for it.",
        "percentunit",
    )

    def bar(expr: str) -> str:
        return sum_by(("place",), f'label_join({in_order(expr)}, "place", "/", "group", "stage")')

    return stacked_bars(
        text,
        "place",
        *(Series(bar(expr), name, color) for name, expr, color in states(STAGE, *OF_GROUP)),
    )


def _stage_by_stage() -> Section:
    reasons = Text(
        "Stage wait by reason",
        "Share of time each stage waits while there is work, by what is missing.",
        "percentunit",
    )
    waits = rate_by((*STAGE, "reason"), names.STAGE_WAIT.name, *OF_GROUP) + " > 0"
    return section(
        "Stage waits",
        line(8, _one_stage().repeat("stage").repeat_direction("h").max_per_row(4)),
        line(8, lines(reasons, Series(in_order(waits), f"{STAGE_LEGEND}: {{{{reason}}}}"))),
        collapsed=True,
    )


def _one_stage() -> timeseries.Panel:
    """Of all chosen groups together, so it is a share of their stages' time, not of one second."""
    text = Text(
        "Stage $stage",
        "Time of this stage by state. recv: the previous stage's tensor; feedback: sampled tokens; send: the next "
        "stage is not receiving; host: its own process; starved: the engine sent no plan.",
        "percentunit",
    )
    one = ('stage="$stage"', *OF_GROUP)
    wall = rate_by((), names.STAGE_WALL.name, *one)

    def part(label: str, metric: str) -> str:
        return f"{rate_by((label,), metric, *one)} / on () group_left () ({wall} > 0)"

    working = {f"busy: {kind}": color for kind, color in BUSY_COLORS.items()}
    waiting = {f"wait: {reason}": color for reason, color in WAIT_COLORS.items()}
    return lines(
        text,
        Series(part("kind", names.STAGE_BUSY.name), "busy: {{kind}}", colors=working),
        Series(part("reason", names.STAGE_WAIT.name), "wait: {{reason}}", colors=waiting),
        Series(idle((), *one), "idle", "gray"),
        stacked=True,
    )
