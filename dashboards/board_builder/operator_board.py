"""*Operator*: does the control plane see the cluster, does it act, and how are models and groups?

Every replica exposes the state of all models, so gauges of models and groups are aggregated by max.
"""

from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard

from board_builder import links
from board_builder.annotations import firing_alerts, reformed_groups, rollouts
from board_builder.board import board
from board_builder.group_phases import groups_by_phase
from board_builder.latencies import heat, quantile_lines
from board_builder.layout import Line, Section, line, section
from board_builder.panels import COUNT, AnyPanel, Limits, Series, Text, lines, number
from board_builder.queries import current, events, in_order, max_by, min_by, or_zero, rate_by, selected, share, sum_by
from board_builder.tables import Column, Key, rows
from board_builder.variables import CLUSTER, choice, cluster_choice, datasource
from board_builder.versions import versions
from stageline_operator.controller.telemetry import metric_names as names

MODEL: Final = ('cluster=~"$cluster",namespace=~"$namespace"', 'model=~"$model"')
PER_MODEL: Final = ("cluster", "namespace", "model")
AGED: Final = Limits(330, 900)
"""Slightly more than the relist interval of five minutes, and the alert's threshold of three intervals."""
BY_CLASS: Final = (*PER_MODEL, "failure_class")
BY_CLASS_LEGEND: Final = "{{namespace}}/{{model}}: {{failure_class}}"


def operator_board() -> Dashboard:
    """One board per installation."""
    info = names.MODEL_INFO.name
    return board(
        links.OPERATOR,
        "Operator",
        "The control plane: whether it sees the cluster and acts, and the state of models and groups.",
        (
            datasource(),
            cluster_choice(info),
            choice("namespace", "Namespace", "Namespaces of PipelineModels.", info, "namespace", (CLUSTER,)),
            choice("model", "Model", "PipelineModels.", info, "model", MODEL[:1]),
        ),
        (reformed_groups(*MODEL), rollouts(*MODEL), firing_alerts()),
        (_is_it_bad(), _groups(), _passes(), _cluster()),
    )


def _is_it_bad() -> Section:
    return section(
        "Overview",
        line(4, *_health(), *_work(), widths=(4, 4, 5, 4, 4, 3)),
        line(7, _models(), _stages(), widths=(13, 11)),
    )


def _health() -> tuple[AnyPanel, ...]:
    leaders = Text(
        "Leaders",
        "Replicas that hold the Lease and act. One is right. With none for longer than half a minute nothing is "
        "started, replaced or scaled; running groups are unaffected.",
        COUNT,
    )
    not_ready = Text(
        "Models not ready",
        "PipelineModels whose condition Ready isn't True: they serve with fewer groups than asked for, or not at all.",
        COUNT,
    )
    unready = sum_by((), current(("ready",), names.MODELS.name, 'ready!="True"', CLUSTER))
    return (
        number(leaders, sum_by((), selected(names.LEADER.name, CLUSTER)), Limits(1, 1, low_is_bad=True)),
        number(not_ready, or_zero(unready, sum_by((), selected(names.MODELS.name, CLUSTER))), Limits(1, 1)),
    )


def _work() -> tuple[AnyPanel, ...]:
    failing = Text(
        "Reconcile error ratio",
        "Share of reconciles that ended in an error and are retried. A few are usual while the API server is "
        "upgraded; a lasting share means that some models are not reconciled.",
        "percentunit",
    )
    longest = Text(
        "Longest reconcile",
        "Duration of the longest running reconcile. Minutes: it hangs, and its model is not after.",
        "s",
    )
    waiting = Text(
        "Work queue depth", "PipelineModels in the work queue, waiting for a worker. It returns to 0.", COUNT
    )
    watch = Text(
        "Oldest watch",
        "Time since the last event or full list of the resource that was silent for longest. Above the relist "
        "interval, five minutes by default, the operator acts on outdated state.",
        "s",
    )
    failed = rate_by((), names.RECONCILE_TOTAL.name, 'outcome="error"', CLUSTER)
    return (
        number(failing, share(failed, rate_by((), names.RECONCILE_TOTAL.name, CLUSTER)), Limits(0.01, 0.1)),
        number(longest, max_by((), selected(names.LONGEST_PASS.name, CLUSTER)), Limits(30, 120)),
        number(waiting, max_by((), selected(names.QUEUE_DEPTH.name, CLUSTER)), Limits(10, 100)),
        number(watch, max_by((), selected(names.WATCH_AGE.name, CLUSTER)), AGED),
    )


def _models() -> AnyPanel:
    wanted = current(PER_MODEL, names.MODEL_DESIRED_REPLICAS.name, *MODEL)
    ready = current(PER_MODEL, names.MODEL_READY_REPLICAS.name, *MODEL)
    left = min_by(PER_MODEL, selected(names.GROUP_RESTARTS_LEFT.name, *MODEL))
    behind = (
        f"{current(PER_MODEL, names.MODEL_GENERATION.name, *MODEL)} - "
        f"{current(PER_MODEL, names.MODEL_OBSERVED_GENERATION.name, *MODEL)}"
    )
    pipeline = links.to_board(links.PIPELINE, namespace="Namespace", model="Model")
    return rows(
        Text(
            "Models",
            "Groups that the spec wants and ready groups; remaining restarts of the group with the fewest; how many "
            "generations of the spec the status is behind.",
            "none",
        ),
        (Key("namespace", "Namespace"), Key("model", "Model", pipeline, "Open its pipeline")),
        (
            Column("Desired", wanted, "none"),
            Column("Ready", ready, "none"),
            Column("Missing", f"{wanted} - {ready}", "none", Limits(1, 1)),
            Column("Restarts left", left, "none", Limits(2, 1, low_is_bad=True)),
            Column("Generations behind", behind, "none", Limits(1, 1)),
        ),
        sort="Missing",
    )


def _stages() -> AnyPanel:
    keys = ("namespace", "model", "group", "stage", "reason")
    pipeline = links.to_board(links.PIPELINE, namespace="namespace", model="model", group="group")
    return rows(
        Text(
            "Stages not ready",
            "By reason: Starting, Unschedulable, ImagePull, NotStarted, QuotaExceeded, PodRefused, NodeUnreachable, "
            "NodeLost, Ending, NoPod. Empty is good.",
            "none",
        ),
        tuple(Key(key, key, pipeline if key == "model" else "", "Open its pipeline") for key in keys),
        (Column("Stages", in_order(current(("cluster", *keys), names.STAGE_NOT_READY.name, *MODEL)), "none"),),
    )


def _groups() -> Section:
    ready = Text(
        "Group startup time",
        "From an incarnation's first pod to the group being ready. Most of it is fetching and loading the model.",
        "s",
    )
    recovery = Text(
        "Group recovery time",
        "From a group's failure to its next incarnation being ready, including back-off: how long its share "
        "of the capacity was gone.",
        "s",
    )
    return section(
        "Groups",
        _lives(),
        line(
            8,
            quantile_lines(ready, names.TIME_TO_READY.name, CLUSTER),
            quantile_lines(recovery, names.RECOVERY.name, CLUSTER),
        ),
    )


def _lives() -> Line:
    phases = Text(
        "Groups by phase",
        "Groups by phase. Starting for long: a model that loads slowly or a stage without a node. "
        "Failed stays until the template changes.",
        COUNT,
    )
    incarnations = Text(
        "Incarnations",
        "How often each group's pods have been created. A staircase is a group that fails again and again.",
        COUNT,
    )
    failures = Text(
        "Group failures by class",
        "Failures of groups by class, counted when they are seen. Without a new incarnation the group waits, has spent "
        "its restarts, or a restart would not help.",
        COUNT,
    )
    lives = current((*PER_MODEL, "group"), names.GROUP_INCARNATION.name, *MODEL)
    return line(
        8,
        lines(phases, groups_by_phase(*MODEL), stacked=True),
        lines(incarnations, Series(lives, "{{namespace}}/{{model}} group {{group}}")),
        lines(failures, Series(events(BY_CLASS, names.GROUP_FAILURES_TOTAL.name, *MODEL), BY_CLASS_LEGEND)),
    )


def _passes() -> Section:
    outcomes = Text(
        "Reconciles by outcome",
        "Reconciles per second: done, stale (another writer was first, retried at once) or error.",
        "ops",
    )
    errors = Text(
        "Reconcile errors by kind", "Failed reconciles per second, by kind of error. The log has each one.", "ops"
    )
    duration = Text("Reconcile duration", "From taking a model off the queue to the last write.", "s")
    spread = Text("Reconcile duration distribution", "Reconciles by duration. A second hump is the API server's.", "s")
    name = names.RECONCILE_DURATION.name
    return section(
        "Reconciliation",
        line(
            8,
            lines(
                outcomes,
                Series(rate_by(("outcome",), names.RECONCILE_TOTAL.name, CLUSTER), "{{outcome}}"),
                stacked=True,
            ),
            lines(errors, Series(rate_by(("kind",), names.RECONCILE_ERRORS_TOTAL.name, CLUSTER), "{{kind}}")),
        ),
        line(8, quantile_lines(duration, name, CLUSTER), heat(spread, name, CLUSTER)),
        collapsed=True,
    )


def _cluster() -> Section:
    return section("Watches and API server", _watches(), _calls(), collapsed=True)


def _watches() -> Line:
    ages = Text(
        "Watch age by resource",
        "Time since the last event or full list of each resource. Where little changes it rises to the relist interval "
        "and drops to 0.",
        "s",
    )
    missed = Text(
        "Relist corrections",
        "Objects whose change a full list showed and the watch had missed, in the window. More than a few: watches "
        "break.",
        COUNT,
    )
    return line(
        8,
        lines(ages, Series(current(("resource",), names.WATCH_AGE.name, CLUSTER), "{{resource}}"), limits=AGED),
        lines(missed, Series(events(("resource",), names.RELIST_CORRECTIONS_TOTAL.name, CLUSTER), "{{resource}}")),
    )


def _calls() -> Line:
    calls = Text(
        "API server requests",
        "Per second, watches left out, by verb and status. Code 0 is no answer; 409 another writer; 429 throttling.",
        "reqps",
    )
    return line(
        8,
        lines(calls, Series(rate_by(("verb", "code"), names.API_REQUESTS_TOTAL.name, CLUSTER), "{{verb}} {{code}}")),
        versions("Replicas", names.BUILD_INFO.name),
    )
