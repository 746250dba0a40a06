"""*Fleet*: do users get good service, which model is affected, and which stage is the cause? The first board after an
alert.
"""

from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard

from board_builder import links
from board_builder.annotations import FIRING, firing_alerts, reformed_groups, rollouts
from board_builder.board import board
from board_builder.fleet_promises import latency, promises
from board_builder.fleet_starts import starts
from board_builder.group_phases import groups_by_phase
from board_builder.layout import Line, Section, line, section
from board_builder.objectives import BURN, RED, over_budget, worst_burn
from board_builder.panels import COUNT, AnyPanel, Limits, Series, Text, judged, lines, number
from board_builder.queries import current, events, in_order, max_by, or_zero, quantile, rate_by, selected, sum_by
from board_builder.requests import ERRORS, FAILING, error_ratio, request_rate
from board_builder.stages import BUSY, GROUP, STAGE, UNEVEN, bubble, busiest, busy, imbalance
from board_builder.tables import Column, Key, rows
from board_builder.variables import CLUSTER, choice, cluster_choice, datasource, hidden
from stageline_gateway.telemetry import metric_names as names
from stageline_operator.controller.telemetry import metric_names as operator

NAMESPACE: Final = 'cluster=~"$cluster",namespace=~"$namespace"'
MODEL: Final = (NAMESPACE, 'model_name=~"$model_name"')
PIPELINE_MODEL: Final = (NAMESPACE, 'model=~"$pipeline_model"')
"""The same models by the operator's labels."""
PER_MODEL: Final = ("cluster", "namespace", "model_name")
READY: Final = {"Ready=True": "green", "Ready=False": "red", "Ready=Unknown": "orange"}
ALERT: Final = (
    ("alertname", "Alert"),
    ("severity", "Severity"),
    ("model_name", "Model name"),
    ("group", "Group"),
    ("stage", "Stage"),
    ("model", "Model"),
    ("namespace", "Namespace"),
    ("cluster", "Cluster"),
)
"""Labels of alerts and their column titles. The most specific label is first, because the rest may not fit."""


def fleet_board() -> Dashboard:
    """One board over all namespaces and models."""
    groups = names.GROUPS.name
    return board(
        links.FLEET,
        "Fleet",
        "Do users get good service, which models don't, and which stage is the cause? All models of all namespaces.",
        (
            datasource(),
            cluster_choice(groups),
            choice("namespace", "Namespace", "Namespaces that gateways serve.", groups, "namespace", (CLUSTER,)),
            choice("model_name", "Model name", "Names that clients ask for.", groups, "model_name", (NAMESPACE,)),
            hidden("pipeline_model", "PipelineModels of these names.", operator.MODEL_INFO.name, "model", MODEL),
        ),
        (reformed_groups(*MODEL), rollouts(*PIPELINE_MODEL), firing_alerts()),
        (_is_it_bad(), _which_stage(), latency(MODEL), promises(MODEL), _states(), starts(MODEL)),
    )


def _is_it_bad() -> Section:
    return section(
        "Overview",
        line(3, *_load()),
        line(3, *_waits(), *_room()),
        # One below the other: side by side their last columns are cut off in a small window.
        line(5, _models()),
        line(4, _alerts()),
    )


def _alerts() -> AnyPanel:
    text = Text(
        "Firing alerts",
        "Each with its labels; its name links to its runbook, docs/runbooks. Empty is good, if the rules are loaded.",
        "none",
    )
    runbook = links.to_runbook("Alert")
    keys = [Key(label, header, runbook if label == "alertname" else "", "Open its runbook") for label, header in ALERT]
    return rows(text, keys, [Column("Alerts", in_order(sum_by([label for label, _ in ALERT], FIRING)), "none")])


def _load() -> tuple[AnyPanel, ...]:
    burn = Text(
        "Highest burn rate",
        "The highest burn rate of all models' error budgets, over an hour. At 1 a budget lasts as long as "
        "planned; at 14.4 an alert pages.",
        "none",
    )
    tokens = Text("Token throughput", "Tokens generated per second, all models together.", "suffix: tokens/s")
    rate = Text("Request rate", "Requests answered per second, whatever their status.", "reqps")
    errors = Text("Error ratio", f"Share of requests that failed. {ERRORS}", "percentunit")
    return (
        number(tokens, rate_by((), names.GENERATION_TOKENS.name, *MODEL)),
        number(burn, max_by((), worst_burn("1h", *MODEL)), BURN),
        number(rate, request_rate((), *MODEL)),
        number(errors, error_ratio((), *MODEL), FAILING),
    )


def _waits() -> tuple[AnyPanel, ...]:
    first = Text("TTFT p99", f"Time to first token: 99 of 100 requests had theirs within this time. {RED}", "s")
    token = Text(
        "TPOT p99",
        f"Time per output token: 99 of 100 requests were at least this fast, averaged over their tokens. {RED}",
        "s",
    )
    return (
        judged(first, quantile(0.99, (), names.TIME_TO_FIRST_TOKEN.name, *MODEL), over_budget("TTFT", *MODEL)),
        judged(token, quantile(0.99, (), names.TIME_PER_OUTPUT_TOKEN.name, *MODEL), over_budget("TPOT", *MODEL)),
    )


def _room() -> tuple[AnyPanel, ...]:
    waiting = Text(
        "Requests waiting",
        "Requests that wait for their first token. Rising while requests don't: too few groups.",
        COUNT,
    )
    down = Text(
        "Groups not ready",
        "Desired groups that get no requests: without pods, starting, failed, or with an open circuit breaker. Without "
        "an operator: those that gateways know and that aren't ready.",
        COUNT,
    )
    ready = current(PER_MODEL, names.GROUPS.name, 'ready="true"', *MODEL)
    missing = f"clamp_min({_wanted()} - ({or_zero(ready, _wanted())}), 0)"
    known = current(PER_MODEL, names.GROUPS.name, 'ready="false"', *MODEL)
    unready = sum_by((), f"{missing} or {known}")
    return (
        number(waiting, sum_by((), selected(names.QUEUED.name, *MODEL))),
        number(down, unready, Limits(1, 1)),
    )


def _models() -> AnyPanel:
    gateway = links.to_board(links.GATEWAY, namespace="Namespace", model_name="Model")
    ready = current(PER_MODEL, names.GROUPS.name, 'ready="true"', *MODEL)
    return rows(
        Text(
            "Models",
            "One row per model name that clients send, most errors first. Empty cells: no requests.",
            "none",
        ),
        (Key("namespace", "Namespace"), Key("model_name", "Model", gateway, "Open the gateway's board for it")),
        (
            Column("Requests/s", rate_by(PER_MODEL, names.REQUESTS.name, *MODEL), "reqps"),
            Column("Errors", error_ratio(PER_MODEL, *MODEL), "percentunit", FAILING),
            Column("TTFT p99", quantile(0.99, PER_MODEL, names.TIME_TO_FIRST_TOKEN.name, *MODEL), "s"),
            Column("TPOT p99", quantile(0.99, PER_MODEL, names.TIME_PER_OUTPUT_TOKEN.name, *MODEL), "s"),
            Column("Waiting", sum_by(PER_MODEL, selected(names.QUEUED.name, *MODEL)), "none"),
            Column("Ready groups", ready, "none", Limits(1, 1, low_is_bad=True)),
            Column("Desired", _wanted(), "none"),
        ),
        sort="Errors",
    )


def _wanted() -> str:
    """Groups that specs want, by the model name that clients use."""
    info = current(("cluster", "namespace", "model", "model_name"), operator.MODEL_INFO.name, *MODEL)
    wanted = current(("cluster", "namespace", "model"), operator.MODEL_DESIRED_REPLICAS.name, *PIPELINE_MODEL)
    return sum_by(PER_MODEL, f"{info} * on (cluster, namespace, model) group_left () {wanted}")


def _which_stage() -> Section:
    share = Text(
        "Busiest stage's utilization",
        "For each group the share of time its busiest stage computes. Near 100 % the group is at its limit.",
        "percentunit",
    )
    wasted = Text(
        "Bubble by group",
        "(wait + dummy) / (busy + wait) over all stages: time that stages had work outstanding and did nothing useful. "
        "Read it beside the busy share: a group with little to do has a large bubble too.",
        "percentunit",
    )
    place = "{{namespace}}/{{model}} group {{group}}"
    return section(
        "Stages and bubble",
        line(
            8,
            _busiest_stages(),
            lines(share, Series(max_by(GROUP, busy(STAGE, *MODEL)), place), limits=BUSY),
            lines(wasted, Series(bubble(GROUP, *MODEL), place)),
            widths=(10, 7, 7),
        ),
    )


def _busiest_stages() -> AnyPanel:
    pipeline = links.to_board(links.PIPELINE, namespace="Namespace", model="Model", group="Group")
    return rows(
        Text(
            "Busiest stage of each group",
            "A pipeline is as fast as its busiest stage. Busy near 100 %: this stage is the limit. Imbalance (busy "
            "time as a multiple of the group's mean) well above 1: layers are unevenly divided or this node is slow. "
            "Bubble is this stage's own.",
            "none",
        ),
        (
            Key("namespace", "Namespace"),
            Key("model", "Model", pipeline, "Open its pipeline"),
            Key("group", "Group"),
            Key("stage", "Stage"),
        ),
        (
            Column("Busy", in_order(f"({busiest(busy(STAGE, *MODEL), *MODEL)})"), "percentunit", BUSY),
            Column("Imbalance", in_order(f"({busiest(imbalance(*MODEL), *MODEL)})"), "none", UNEVEN),
            Column("Bubble", in_order(f"({busiest(bubble(STAGE, *MODEL), *MODEL)})"), "percentunit"),
        ),
        sort="Busy",
    )


def _states() -> Section:
    return section("Models and groups", _by_model(), _by_state())


def _by_model() -> Line:
    rate = Text("Request rate by model", "Requests answered per second.", "reqps")
    errors = Text("Error ratio by model", f"Share of requests that failed. {ERRORS}", "percentunit")
    name = "{{namespace}}/{{model_name}}"
    return line(
        8,
        lines(rate, Series(rate_by(PER_MODEL, names.REQUESTS.name, *MODEL), name), stacked=True),
        lines(errors, Series(error_ratio(PER_MODEL, *MODEL), name)),
    )


def _by_state() -> Line:
    ready = Text(
        "Models by readiness", "PipelineModels of all namespaces by the status of their Ready condition.", COUNT
    )
    phases = Text("Groups by phase", "Groups by phase.", COUNT)
    failures = Text("Group failures", "By model and class of the cause, in the window.", COUNT)
    by_class = ("cluster", "namespace", "model", "failure_class")
    failed = events(by_class, operator.GROUP_FAILURES_TOTAL.name, *PIPELINE_MODEL)
    return line(
        8,
        lines(
            ready,
            Series(current(("ready",), operator.MODELS.name, CLUSTER), "Ready={{ready}}", colors=READY),
            stacked=True,
        ),
        lines(phases, groups_by_phase(*PIPELINE_MODEL), stacked=True),
        lines(failures, Series(failed, "{{namespace}}/{{model}}: {{failure_class}}")),
    )
