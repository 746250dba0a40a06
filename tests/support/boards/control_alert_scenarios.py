"""Scenarios of the alerts about the operator, the gateway's sources and the scrape."""

from typing import Final

from boards.alert_scenarios import Firing, Scenario, series
from boards.user_alert_scenarios import OBJECT

SILENT_STAGE: Final = Firing(
    "StagelineTargetDown",
    {"job": "stageline-stage", "instance": "stage:1", "pod": "a", **OBJECT, "group": "0"},
)
UNREADABLE_NODES: Final = Firing("StagelineResourceUnreadable", {"pod": "operator-0", "resource": "nodes"})
GATEWAY: Final = {"namespace": "team", "pod": "gateway-0"}
EXPIRY: Final = "stageline_gateway_tls_certificate_expiry_timestamp_seconds"
_YEAR: Final = 365 * 86400
_DOWN: Final = (Firing("StagelineOperatorDown", {}),)
_DOWN_PROD: Final = (Firing("StagelineOperatorDown", {"release": "prod/stageline"}),)


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
        "stages in a cluster have no operator, for longer than anybody remembers one",
        up("stage", "1x450", pod="smollm2-0-0", release="prod/stageline"),
        {"4m": (), "7m": _DOWN_PROD, "7h": _DOWN_PROD},
        step="1m",
        evaluated_every="1m",
    ),
    Scenario(
        "the operator of one release is dead and that of another leads",
        up("operator", "1x40 0x80", pod="a-0", release="prod/stageline")
        | up("operator", "1x120", pod="b-0", release="trial/stageline")
        | {
            series("stageline_operator_leader", pod="a-0", release="prod/stageline"): "1x40 stale _x79",
            series("stageline_operator_leader", pod="b-0", release="trial/stageline"): "1x120",
        },
        {
            "14m": (),
            "17m": (
                *_DOWN_PROD,
                Firing(
                    "StagelineTargetDown",
                    {"job": "stageline-operator", "instance": "operator:1", "pod": "a-0", "release": "prod/stageline"},
                ),
            ),
        },
    ),
    Scenario(
        "an operator's release is removed as planned: within the hour it is forgotten",
        up("operator", "1x40 stale _x300", pod="a-0", release="trial/stageline")
        | {series("stageline_operator_leader", pod="a-0", release="trial/stageline"): "1x40 stale _x300"},
        {"19m": (), "1h25m": ()},
        step="30s",
        spares=("StagelineOperatorDown",),
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
            series("stageline_operator_leader", pod="operator-1"): "1x100",
            series("stageline_operator_reconcile_total", pod="operator-1", outcome="done"): "7x100",
            series("stageline_operator_longest_pass_seconds", pod="operator-2"): "100x100",
            series("stageline_operator_queue_depth", pod="operator-2"): "4x100",
            series("stageline_operator_reconcile_total", pod="operator-2", outcome="done"): "0+0.2x100",
        },
        {
            "6m": (),
            "8m": (Firing("StagelineOperatorStuck", {"pod": "operator-0"}),),
            "13m": (
                Firing("StagelineOperatorStuck", {"pod": "operator-0"}),
                Firing("StagelineOperatorStuck", {"pod": "operator-1"}),
            ),
        },
        spares=("StagelineOperatorStuck",),
    ),
    Scenario(
        "a leader has never ended a pass; one that waits to lead has ended none either",
        {
            series("stageline_operator_queue_depth", pod="operator-0"): "4x100",
            series("stageline_operator_leader", pod="operator-0"): "1x100",
            series("stageline_operator_queue_depth", pod="operator-1"): "4x100",
            series("stageline_operator_leader", pod="operator-1"): "0x100",
        },
        {"9m": (), "13m": (Firing("StagelineOperatorStuck", {"pod": "operator-0"}),)},
        spares=("StagelineOperatorStuck",),
    ),
    Scenario(
        "passes of one model fail all the time, 22.2 in a quarter of an hour; those of another failed for a moment",
        {
            series(
                "stageline_operator_reconcile_errors_total", **OBJECT, kind="refused", pod="operator-0"
            ): "0+0.37x160",
            series(
                "stageline_operator_reconcile_errors_total",
                namespace="team",
                model="other",
                kind="unavailable",
                pod="operator-0",
            ): "0x10 20x150",
        },
        {"14m": (), "30m": (Firing("StagelineReconcileFailing", {**OBJECT, "kind": "refused"}, "22"),)},
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
    Scenario(
        "nodes can't be listed, nor pods of one namespace; those of another can't for a moment",
        {
            series("stageline_operator_unreadable", pod="operator-0", resource="nodes"): "1x60",
            series("stageline_operator_unreadable", pod="operator-0", namespace="team", resource="pods"): "_x10 1x50",
            series("stageline_operator_unreadable", pod="operator-0", namespace="other", resource="pods"): (
                "_x10 1x8 stale _x60"
            ),
        },
        {
            "9m": (),
            "11m": (UNREADABLE_NODES,),
            "14m": (
                UNREADABLE_NODES,
                Firing("StagelineResourceUnreadable", {"pod": "operator-0", "namespace": "team", "resource": "pods"}),
            ),
        },
        spares=("StagelineResourceUnreadable",),
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
    Scenario(
        "a stage of a ready group answers no scrape for a day; one of a group that is being replaced neither",
        up("stage", "1x5 0x400", pod="a", **OBJECT, group="0")
        | up("stage", "1x5 0x400", pod="b", **OBJECT, group="1")
        | {
            series("stageline_operator_group_phase", **OBJECT, group="0", phase="Ready"): "1x405",
            series("stageline_operator_group_phase", **OBJECT, group="1", phase="Replacing"): "1x405",
        },
        dict.fromkeys(
            ("1h", "20h"),
            (SILENT_STAGE,),
        ),
        spares=("StagelineTargetDown",),
        step="3m",
        evaluated_every="3m",
    ),
    Scenario(
        "no operator knows of a stage that answers no scrape for a day, nor of another that takes three hours to load",
        up("stage", "1x5 0x400", pod="a", **OBJECT, group="0")
        | up("stage", "0x60 1x345", pod="b", **OBJECT, group="1"),
        dict.fromkeys(
            ("1h", "5h", "7h", "20h"),
            (SILENT_STAGE,),
        ),
        spares=("StagelineTargetDown",),
        step="3m",
        evaluated_every="3m",
    ),
    Scenario(
        "the only gateway answers no scrape for a day, and its target stays",
        up("gateway", "1x5 0x400", pod="gateway-0", namespace="team"),
        dict.fromkeys(
            ("1h", "5h", "7h", "20h"),
            (
                Firing("StagelineGatewayDown", {"namespace": "team"}),
                Firing(
                    "StagelineTargetDown",
                    {"job": "stageline-gateway", "instance": "gateway:1", "pod": "gateway-0", "namespace": "team"},
                ),
            ),
        ),
        step="3m",
        evaluated_every="3m",
    ),
    Scenario(
        "a gateway's target never answers: after half an hour it is no more said to be starting",
        up("gateway", "0x200", pod="gateway-0", namespace="team"),
        {
            "29m": (),
            "37m": (
                Firing("StagelineGatewayDown", {"namespace": "team"}),
                Firing(
                    "StagelineTargetDown",
                    {"job": "stageline-gateway", "instance": "gateway:1", "pod": "gateway-0", "namespace": "team"},
                ),
            ),
        },
        spares=("StagelineTargetDown", "StagelineGatewayDown"),
    ),
)
