"""Scenarios of the alerts about requests that wait: too long, without end, and where no token comes."""

from typing import Final

from boards.alert_scenarios import Firing, Pipeline, Scenario, series
from boards.user_alert_scenarios import FIRST_TOKEN, MODEL, burns, groups, latency

ABANDONED: Final = "stageline_gateway_abandoned_after_seconds"

QUEUES: Final = (
    Scenario(
        "requests wait at a ready group that gives no token",
        {
            **groups("1x100", "0x100"),
            series("stageline_gateway_requests_queued", **MODEL, pod="gateway-0"): "0x20 4x80",
            series("stageline_generation_tokens_total", **MODEL, pod="gateway-0"): "0+50x20 1000x80",
        },
        {"8m": (), "10m": (Firing("StagelineNoTokens", MODEL, "4"),)},
    ),
    Scenario(
        "requests wait and tokens come; or wait without a ready group, which has its own alert",
        {
            **groups("1x100", "0x100"),
            series("stageline_gateway_requests_queued", **MODEL, pod="gateway-0"): "4x100",
            series("stageline_generation_tokens_total", **MODEL, pod="gateway-0"): "0+1x100",
            series("stageline_gateway_groups", namespace="team", model_name="lost", ready="true"): "1x20 0x80",
            series("stageline_gateway_groups", namespace="team", model_name="lost", ready="false"): "0x20 1x80",
            series("stageline_gateway_requests_queued", namespace="team", model_name="lost"): "4x100",
        },
        {"10m": (Firing("StagelineNoReadyGroup", {"namespace": "team", "model_name": "lost"}),)},
        spares=("StagelineNoTokens",),
    ),
    Scenario(
        "a queue of 40 at one first token a second is a wait of 40 s; one of 20 is not too long",
        {
            series("stageline_gateway_requests_queued", **MODEL, pod="gateway-0"): "20x60 40x80 20x100",
            **latency(FIRST_TOKEN, "2.0", "0+15x300", "0+15x300"),
            **Pipeline(busy=(0.93, 0.9), waiting=3).series(300),
            **Pipeline(busy=(0.8, 0.9), group="1").series(300),
        },
        {
            "14m": (),
            "19m": (),
            "28m": (
                Firing(
                    "StagelineRequestsQueuedTooLong",
                    MODEL,
                    "40s",
                    asked="Requests wait in group 0 of smollm2, whose busiest stage, 0, computes 93% of the time. ",
                ),
            ),
            "50m": (),
        },
        spares=("StagelineRequestsQueuedTooLong", "StagelineFirstTokenBudgetBurn"),
    ),
    Scenario(
        "requests wait and none of them gets a first token: the wait is said to have no end",
        {
            **groups("1x100", "0x100"),
            series("stageline_gateway_requests_queued", **MODEL, pod="gateway-0"): "0x20 4x80",
            series("stageline_generation_tokens_total", **MODEL, pod="gateway-0"): "1000x100",
            **latency(FIRST_TOKEN, "2.0", "50x100", "50x100"),
        },
        {
            "8m": (),
            "14m": (
                Firing("StagelineNoTokens", MODEL, "4"),
                Firing("StagelineRequestsQueuedTooLong", MODEL, "+Inf"),
            ),
        },
    ),
    Scenario(
        "nine in ten leave after half a minute while a queue of 20 stands and one first token a second comes in time",
        {
            **groups("1x80", "0x80"),
            series("stageline_gateway_requests_queued", **MODEL, pod="gateway-0"): "20x80",
            series("stageline_generation_tokens_total", **MODEL, pod="gateway-0"): "0+120x80",
            **latency(FIRST_TOKEN, "2.0", "0+120x80", "0+120x80"),
            **latency(ABANDONED, "2.0", "0x80", "0+1080x80"),
        },
        {
            "16m": (
                Firing("StagelineRequestsAbandoned", MODEL, "90%"),
                *burns("StagelineFirstTokenBudgetBurn", "90%", "1h"),
            ),
            "2h30m": (
                Firing("StagelineRequestsAbandoned", MODEL, "90%"),
                *burns("StagelineFirstTokenBudgetBurn", "90%", "1h", "6h", "1d"),
            ),
        },
        step="2m",
        evaluated_every="2m",
    ),
    Scenario(
        "half of the clients leave at once, as editors do: not slow; of another model two in ten",
        {
            **latency(FIRST_TOKEN, "2.0", "0+20x100", "0+20x100"),
            **latency(ABANDONED, "2.0", "0+20x100", "0+20x100"),
            series(f"{FIRST_TOKEN}_count", namespace="team", model_name="other"): "0+80x100",
            series(f"{ABANDONED}_bucket", namespace="team", model_name="other", le="+Inf"): "0+20x100",
            series(f"{ABANDONED}_count", namespace="team", model_name="other"): "0+20x100",
        },
        {"4m": (), "14m": (Firing("StagelineRequestsAbandoned", MODEL, "50%"),)},
        spares=("StagelineRequestsAbandoned", "StagelineFirstTokenBudgetBurn"),
    ),
    Scenario(
        "one client waits alone for four minutes and gives up",
        {
            series("stageline_gateway_requests_queued", **MODEL, pod="gateway-0"): "0x20 1x16 0x60",
            **latency(FIRST_TOKEN, "2.0", "50x100", "50x100"),
        },
        dict.fromkeys(("8m", "10m", "11m", "12m", "13m", "14m", "16m"), ()),
        spares=("StagelineRequestsQueuedTooLong",),
    ),
)
