"""Scenarios of the alerts about a model's groups: their lives, and what their pipelines do with their time."""

from typing import Final

from boards.alert_scenarios import Firing, Pipeline, Scenario, series
from boards.user_alert_scenarios import MODEL, OBJECT, groups

GROUP: Final = {**OBJECT, "group": "0"}
SERVED: Final = {**GROUP, "model_name": "smollm2-chat"}
ANOTHER: Final = {**SERVED, "group": "1"}
THIRD: Final = {**SERVED, "group": "2"}


def phase(values: dict[str, str], **labels: str) -> dict[str, str]:
    """Phases of a group, as the operator says them: a sample only while it is in that phase."""
    return {
        series("stageline_operator_group_phase", **GROUP, **labels, phase=name): each for name, each in values.items()
    }


def not_ready(values: dict[str, str], stage: str = "1") -> dict[str, str]:
    """Why a stage isn't ready, by reason."""
    return {
        series("stageline_operator_stage_not_ready", **GROUP, stage=stage, reason=reason): each
        for reason, each in values.items()
    }


def incarnations(values: str, group: str = "0") -> dict[str, str]:
    """As the operator counts a group's lives."""
    return {series("stageline_operator_group_incarnation", **{**GROUP, "group": group}): values}


def recent_restarts(values: str) -> dict[str, str]:
    """Restarts that the group has used up within its window."""
    return {series("stageline_operator_group_recent_restarts", **GROUP): values}


def last_failure(failure_class: str, unix_seconds: str) -> dict[str, str]:
    """When stage 1 failed last, as the operator has it on record."""
    labels = {**GROUP, "stage": "1", "failure_class": failure_class}
    return {series("stageline_operator_group_last_failure_timestamp_seconds", **labels): unix_seconds}


LIVES: Final = (
    Scenario(
        "a group goes from phase to phase and never becomes ready",
        phase({"Creating": "1x30 _x70", "Starting": "_x31 1x30 _x60", "BackingOff": "_x62 1x38"}),
        {
            "14m30s": (),
            "16m": (Firing("StagelineGroupNotReady", GROUP),),
            "24m": (Firing("StagelineGroupNotReady", GROUP),),
        },
    ),
    Scenario(
        "a group is ready after ten minutes; another drains for long; a third has failed, which has its own alert",
        {
            **phase({"Starting": "1x40 _x60", "Ready": "_x41 1x60"}),
            series("stageline_operator_group_phase", **{**GROUP, "group": "1"}, phase="Draining"): "1x100",
            series("stageline_operator_group_phase", **{**GROUP, "group": "2"}, phase="Failed"): "1x100",
        },
        {"20m": (Firing("StagelineGroupFailed", {**GROUP, "group": "2"}),)},
        spares=("StagelineGroupNotReady",),
    ),
    Scenario(
        "where no operator runs the gateway misses a group",
        groups("2x20 1x100", "0x20 1x100"),
        {"19m": (), "22m": (Firing("StagelineGroupNotReady", {**GROUP, "group": "unknown", "model": "smollm2-chat"}),)},
    ),
    Scenario(
        "a group fails for the first time and again within a minute; ten minutes later it is forgiven",
        incarnations("1x40 2x4 3x100")
        | recent_restarts("0x38 1x4 2x36 1x4 0x60")
        | last_failure("Killed", "_x38 570x4 630x100"),
        {
            "10m30s": (),
            "13m": (Firing("StagelineGroupRestarting", GROUP | {"stage": "1", "failure_class": "Killed"}, "2"),),
            "28m": (),
        },
        spares=("StagelineGroupRestarting",),
    ),
    Scenario(
        "on one machine the stages themselves say which life of the group they belong to",
        {
            series("stageline_stage_incarnation", **SERVED, stage="0", pod="a"): "1x40 _x200",
            series("stageline_stage_incarnation", **SERVED, stage="0", pod="b"): "_x43 2x10 _x100",
            series("stageline_stage_incarnation", **SERVED, stage="0", pod="c"): "_x56 3x100",
        },
        {"12m": (), "15m": (Firing("StagelineGroupRestarting", GROUP, "2"),)},
    ),
    Scenario(
        "a group fails three times, of two causes; the newest failure on record says which and why",
        incarnations("4x40 5x4 6x100")
        | recent_restarts("1x40 2x4 3x100")
        | last_failure("OOMKilled", "60x40 stale")
        | last_failure("Killed", "_x41 600x4 660x100"),
        {"13m": (Firing("StagelineGroupRestarting", GROUP | {"stage": "1", "failure_class": "Killed"}, "3"),)},
    ),
    Scenario(
        "a group that failed once is restarted twice by hand, or in place by two rollouts",
        incarnations("1x260 2x10 3x40") | recent_restarts("0x200 1x40 0x80") | last_failure("Killed", "_x200 3000x120"),
        {"1h4m": (), "1h9m": ()},
        evaluated_every="1m",
        spares=("StagelineGroupRestarting",),
    ),
    Scenario(
        "a group fails twice between two scrapes; that is two, and its record may be crowded out by other groups'",
        incarnations("1x40 3x60") | recent_restarts("0x40 2x40 0x20"),
        {"9m": (), "11m": (Firing("StagelineGroupRestarting", GROUP, "2"),), "21m": ()},
        spares=("StagelineGroupRestarting",),
    ),
    Scenario(
        "a group gives its nodes back and tries again, three times, for a quota is used up: that uses up no restart",
        incarnations("1x20 2x10 3x10 4x60")
        | recent_restarts("0x100")
        | last_failure("QuotaExceeded", "_x15 240x10 400x10 550x60"),
        {"11m": (), "20m": ()},
        spares=("StagelineGroupRestarting",),
    ),
    Scenario(
        "a group is made anew once; the index of another is given to a new group, which goes on at a higher number",
        incarnations("1x40 2x60") | incarnations("5x40 9x60", group="1"),
        {"11m": (), "20m": ()},
        spares=("StagelineGroupRestarting",),
    ),
    Scenario(
        "a group backs off and starts, then has spent its restarts",
        phase({"BackingOff": "1x20 _x80", "Starting": "_x21 1x19 _x80", "Failed": "_x40 1x60"})
        | not_ready({"NoPod": "_x40 1x60"})
        | last_failure("OOMKilled", "60x100"),
        {
            "10m": (),
            "11m30s": (Firing("StagelineGroupFailed", GROUP | {"stage": "1", "failure_class": "OOMKilled"}),),
            "24m": (Firing("StagelineGroupFailed", GROUP | {"stage": "1", "failure_class": "OOMKilled"}),),
        },
        spares=("StagelineGroupFailed", "StagelineStagePending"),
    ),
    Scenario(
        "a stage finds no node; the group gives its nodes back between two tries",
        not_ready({"Unschedulable": "1x15 _x4 1x80", "NoPod": "_x15 1x4 _x80"})
        | not_ready({"Starting": "1x100"}, stage="0"),
        {"9m": (), "11m": (Firing("StagelineStagePending", {**GROUP, "stage": "1"}),)},
        spares=("StagelineStagePending",),
    ),
    Scenario(
        "a rollout is past its deadline; another model's is still moving",
        {
            series(
                "stageline_operator_model_condition",
                **OBJECT,
                type="Progressing",
                status="False",
                reason="ProgressDeadlineExceeded",
            ): "_x20 1x60",
            series(
                "stageline_operator_model_condition",
                namespace="team",
                model="other",
                type="Progressing",
                status="True",
                reason="RollingOut",
            ): "1x80",
        },
        {"4m": (), "7m": (Firing("StagelineRolloutStuck", OBJECT),)},
        spares=("StagelineRolloutStuck",),
    ),
    Scenario(
        "requests to a group fail again and again; to that of another model for a moment",
        {
            series("stageline_gateway_circuits_open", **MODEL, pod="gateway-0"): "0x20 1x3 0x3 1x3 0x3 1x3 0x3 1x100",
            series("stageline_gateway_circuits_open", namespace="team", model_name="other"): "0x20 1x8 0x100",
        },
        {"14m": (), "17m": (Firing("StagelineCircuitOpen", MODEL, "1"),)},
        spares=("StagelineCircuitOpen",),
    ),
)

PIPELINES: Final = (
    Scenario(
        "two stages as even as they come, with requests queued",
        Pipeline(busy=(0.93, 0.9), idle=0.01, waiting=3).series(100),
        {"20m": ()},
        spares=("StagelineBubbleHigh", "StagelineStageBottleneck"),
    ),
    Scenario(
        "one stage of four takes twice as long, and requests queue: it alone explains the bubble",
        Pipeline(busy=(0.48, 0.96, 0.48, 0.48), waiting=3).series(60),
        {"4m": (), "14m": (Firing("StagelineStageBottleneck", {**SERVED, "stage": "1"}, "2.00"),)},
        spares=("StagelineBubbleHigh",),
    ),
    Scenario(
        "an uneven cut whose stages also wait for a slow link while requests queue",
        Pipeline(busy=(0.4, 0.5), waiting=3).series(60),
        {"4m": (), "14m": (Firing("StagelineBubbleHigh", SERVED, "45%"),)},
    ),
    Scenario(
        "long prompts let one of two cohorts run while requests queue: half of the time is lost as it must be",
        Pipeline(busy=(0.48, 0.48), waiting=2, running=2, kv_usage=0.9, empty_cohorts=1).series(60),
        {"4m": (), "14m": (Firing("StagelineKVCacheExhausted", SERVED, "90%"),)},
        spares=("StagelineBubbleHigh",),
    ),
    Scenario(
        "a full cache lets long prompts in one after the other, and steps differ in size: the cache is what is named",
        Pipeline(busy=(0.6, 0.6), waiting=8, running=4, kv_usage=1.0).series(60),
        {"4m": (), "14m": (Firing("StagelineKVCacheExhausted", SERVED, "100%"),)},
        spares=("StagelineBubbleHigh",),
    ),
    Scenario(
        "one request at a time: each stage waits for the others, and nobody for them",
        Pipeline(busy=(0.3, 0.6), idle=0.05).series(60),
        {"14m": ()},
        spares=("StagelineBubbleHigh", "StagelineStageBottleneck"),
    ),
    Scenario(
        "stages wait for a slow link while requests queue; no stage is the bottleneck",
        Pipeline(busy=(0.6, 0.6), waiting=2).series(60),
        {"14m": (Firing("StagelineBubbleHigh", SERVED, "40%"),)},
        spares=("StagelineStageBottleneck",),
    ),
    Scenario(
        "an uneven cut over two hours of work; another group is as uneven but hardly works",
        Pipeline(busy=(0.4, 0.75), idle=0.1).series(100, 60)
        | Pipeline(busy=(0.1, 0.2), idle=0.7, group="1").series(100, 60),
        {"20m": (), "95m": (Firing("StagelineGroupImbalanced", SERVED, "1.30"),)},
        spares=("StagelineGroupImbalanced",),
        step="1m",
        evaluated_every="1m",
    ),
    Scenario(
        "a full KV cache with requests that wait for it; another is as full and nobody waits",
        Pipeline(busy=(0.93, 0.93), waiting=2, kv_usage=0.98).series(60)
        | Pipeline(busy=(0.93, 0.93), group="1", kv_usage=0.98).series(60),
        {"4m": (), "14m": (Firing("StagelineKVCacheExhausted", SERVED, "98%"),)},
        spares=("StagelineKVCacheExhausted",),
    ),
    Scenario(
        "a full KV cache that the memory of one stage bounds; in another group both stages have as little",
        Pipeline(busy=(0.93, 0.93), waiting=2, kv_usage=0.98, room=(2048, 1024)).series(60)
        | Pipeline(busy=(0.93, 0.93), waiting=2, kv_usage=0.97, group="1", room=(1024, 1024)).series(60),
        {
            "14m": (
                Firing("StagelineKVCacheExhausted", {**SERVED, "stage": "1"}, "98%"),
                Firing("StagelineKVCacheExhausted", ANOTHER, "97%"),
            )
        },
    ),
    Scenario(
        "a long prompt waits for room though slots are free; in another group requests wait for slots",
        Pipeline(busy=(0.93, 0.93), waiting=1, running=5, kv_usage=0.75).series(60)
        | Pipeline(busy=(0.93, 0.93), waiting=1, group="1", kv_usage=0.75).series(60),
        {"4m": (), "14m": (Firing("StagelineKVCacheExhausted", SERVED, "75%"),)},
        spares=("StagelineKVCacheExhausted",),
    ),
    Scenario(
        "one request in four loses its place in the KV cache; in another group one in fifty; in a third none is begun",
        {
            series("stageline_preemptions_total", **SERVED): "0+1x120",
            series("stageline_request_queue_time_seconds_count", **SERVED): "0+4x120",
            series("stageline_preemptions_total", **ANOTHER): "0+1x120",
            series("stageline_request_queue_time_seconds_count", **ANOTHER): "0+50x120",
            series("stageline_preemptions_total", **THIRD): "0+1x120",
            series("stageline_request_queue_time_seconds_count", **THIRD): "7x120",
        },
        {
            "9m": (),
            "22m": (
                Firing("StagelineRequestsPreempted", SERVED, "40"),
                Firing("StagelineRequestsPreempted", THIRD, "40"),
            ),
        },
        spares=("StagelineRequestsPreempted",),
    ),
)
