"""Scenarios of the alerts about the operator, the gateway's sources and the scrape."""

from typing import Final

from boards.alert_scenarios import Firing, Scenario, series
from boards.user_alert_scenarios import OBJECT

GATEWAY: Final = {"namespace": "team", "pod": "gateway-0"}
EXPIRY: Final = "stageline_gateway_tls_certificate_expiry_timestamp_seconds"
_YEAR: Final = 365 * 86400
_DOWN: Final = (Firing("StagelineOperatorDown", {}),)


def up(job: str, values: str, **labels: str) -> dict[str, str]:
    """Whether a target answers."""
    return {series("up", job=f"stageline-{job}", instance=f"{job}:1", **labels): values}


OPERATOR: Final = (
    Scenario(
        "the operator's last replica goes, and comes back",
        up("operator", "1x40 stale _x59 1x60", pod="operator-0")
        | {series("stageline_operator_leader", pod="operator-0"): "1x40 stale _x59 1x60"},
        {"10m": (), "14m": (), "19m": _DOWN, "28m": ()},
    ),
    Scenario(
        "replicas answer and none of them leads",
        up("operator", "1x100", pod="operator-0")
        | {series("stageline_operator_leader", pod="operator-0"): "1x20 0x80"},
        {"8m": (), "14m": _DOWN},
    ),
    Scenario(
        "stages in a cluster have no operator",
        up("stage", "1x60", pod="smollm2-0-0", endpoint="health"),
        {"4m": (), "7m": _DOWN},
    ),
    Scenario(
        "stages of `stageline up` need none; a leader is followed by another",
        up("stage", "1x100", pod="smollm2-0-0")
        | {
            series("stageline_operator_leader", pod="operator-0"): "_x20 1x20 _x60",
            series("stageline_operator_leader", pod="operator-1"): "_x20 0x26 1x54",
        },
        {"7m": (), "15m": (), "20m": ()},
        spares=("StagelineOperatorDown",),
    ),
    Scenario(
        "one pass does not end; another operator has a queue and ends none; a third is slow and gets on",
        {
            series("stageline_operator_longest_pass_seconds", pod="operator-0"): "0x10 0+15x90",
            series("stageline_operator_queue_depth", pod="operator-1"): "4x100",
            series("stageline_operator_reconcile_total", pod="operator-1", outcome="done"): "7x100",
            series("stageline_operator_longest_pass_seconds", pod="operator-2"): "100x100",
            series("stageline_operator_queue_depth", pod="operator-2"): "4x100",
            series("stageline_operator_reconcile_total", pod="operator-2", outcome="done"): "0+0.2x100",
        },
        {
            "6m": (Firing("StagelineOperatorStuck", {"pod": "operator-1"}),),
            "8m": (
                Firing("StagelineOperatorStuck", {"pod": "operator-0"}),
                Firing("StagelineOperatorStuck", {"pod": "operator-1"}),
            ),
        },
        spares=("StagelineOperatorStuck",),
    ),
    Scenario(
        "passes fail all the time; those of another kind failed for a moment",
        {
            series("stageline_operator_reconcile_errors_total", kind="refused", pod="operator-0"): "0+1x160",
            series("stageline_operator_reconcile_errors_total", kind="unavailable", pod="operator-0"): "0x10 20x150",
        },
        {"14m": (), "30m": (Firing("StagelineReconcileFailing", {"kind": "refused"}, "60"),)},
        spares=("StagelineReconcileFailing",),
    ),
    Scenario(
        "a changed spec is not taken up; another is within minutes",
        {
            series("stageline_operator_model_generation", **OBJECT, pod="operator-0"): "1x10 2x100",
            series("stageline_operator_model_observed_generation", **OBJECT, pod="operator-0"): "1x110",
            series("stageline_operator_model_generation", namespace="team", model="other"): "1x10 2x100",
            series("stageline_operator_model_observed_generation", namespace="team", model="other"): "1x20 2x90",
        },
        {"16m": (), "19m": (Firing("StagelineModelNotReconciled", OBJECT),)},
        spares=("StagelineModelNotReconciled",),
    ),
    Scenario(
        "nothing is heard of pods; of nodes no later than the next full list",
        {
            series("stageline_operator_watch_age_seconds", pod="operator-0", resource="pods"): "0+15x120",
            series("stageline_operator_watch_age_seconds", pod="operator-0", resource="nodes"): "300x120",
        },
        {
            "19m": (),
            "25m": (Firing("StagelineWatchStale", {"pod": "operator-0", "resource": "pods"}, "25m 0s"),),
        },
        spares=("StagelineWatchStale",),
    ),
)

GATEWAY_SOURCES: Final = (
    Scenario(
        "the endpoints can't be read; another gateway looks at them and finds nothing new; a third's reading hangs",
        {
            series("stageline_gateway_endpoints_stale", **GATEWAY): "0x10 1x60",
            series("stageline_gateway_endpoints_stale", namespace="team", pod="gateway-1"): "0x10 1x8 0x60",
            series("stageline_gateway_discovery_age_seconds", namespace="team", pod="gateway-1"): "30x70",
            series("stageline_gateway_discovery_age_seconds", namespace="team", pod="gateway-2"): "0+15x70",
        },
        {
            "7m": (),
            "9m": (Firing("StagelineEndpointsStale", GATEWAY),),
            "12m": (
                Firing("StagelineEndpointsStale", GATEWAY),
                Firing("StagelineEndpointsStale", {"namespace": "team", "pod": "gateway-2"}),
            ),
        },
        spares=("StagelineEndpointsStale",),
    ),
    Scenario(
        "keys and certificate can't be read again; at another gateway for a moment",
        {
            series("stageline_gateway_keys_stale", **GATEWAY): "0x10 1x60",
            series("stageline_gateway_tls_stale", **GATEWAY): "0x10 1x60",
            series("stageline_gateway_keys_stale", namespace="team", pod="gateway-1"): "0x10 1x8 0x60",
            series("stageline_gateway_tls_stale", namespace="team", pod="gateway-1"): "0x10 1x8 0x60",
        },
        {
            "7m": (),
            "9m": (Firing("StagelineKeysStale", GATEWAY), Firing("StagelineCertificateStale", GATEWAY)),
        },
        spares=("StagelineKeysStale", "StagelineCertificateStale"),
    ),
    Scenario(
        "a certificate ends in a week, then in a day, and is renewed; another's has months",
        {
            series(EXPIRY, **GATEWAY): f"{8 * 86400}x110 {_YEAR}x20",
            series(EXPIRY, namespace="team", pod="gateway-1"): f"{90 * 86400}x130",
        },
        {
            "24h": (),
            "28h": (Firing("StagelineCertificateExpiring", GATEWAY, "6d 20h 0m 0s", severity="warning"),),
            "172h": (Firing("StagelineCertificateExpiring", GATEWAY, "20h 0m 0s", severity="critical"),),
            "230h": (),
        },
        spares=("StagelineCertificateExpiring",),
        step="2h",
        evaluated_every="2h",
    ),
)

SCRAPES: Final = (
    Scenario(
        "a stage answers no scrape any more; another is still being loaded, a third is gone with its pod",
        up("stage", "1x20 0x60", pod="smollm2-0-1")
        | up("engine", "0x80", pod="smollm2-1-0")
        | up("gateway", "1x20 _x10 1x50", pod="gateway-0", namespace="team")
        | {series("up", job="other", instance="x"): "1x20 0x60"},
        {
            "9m": (),
            "11m": (
                Firing(
                    "StagelineTargetDown",
                    {"job": "stageline-stage", "instance": "stage:1", "pod": "smollm2-0-1"},
                ),
            ),
        },
        spares=("StagelineTargetDown",),
    ),
)
