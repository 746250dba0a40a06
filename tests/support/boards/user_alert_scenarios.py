"""Scenarios of the alerts that users notice: no group, budgets that burn, no gateway."""

from typing import Final

from boards.alert_scenarios import Firing, Scenario, series

MODEL: Final = {"namespace": "team", "model_name": "smollm2-chat"}
OBJECT: Final = {"namespace": "team", "model": "smollm2"}
_NO_GROUP: Final = (Firing("StagelineNoReadyGroup", MODEL),)


def groups(ready: str, missing: str) -> dict[str, str]:
    """What the gateway says of a model's groups."""
    return {
        series("stageline_gateway_groups", **MODEL, pod="gateway-0", ready="true"): ready,
        series("stageline_gateway_groups", **MODEL, pod="gateway-0", ready="false"): missing,
    }


def wanted(replicas: str) -> dict[str, str]:
    """What two replicas of the operator say that there should be."""
    return {
        series(name, **labels, pod=pod): values
        for pod in ("operator-0", "operator-1")
        for name, labels, values in (
            ("stageline_operator_model_info", {**OBJECT, "model_name": "smollm2-chat"}, "1x800"),
            ("stageline_operator_model_desired_replicas", OBJECT, replicas),
            ("stageline_operator_leader", {}, "1x800"),
        )
    }


def on_record(ready: str) -> dict[str, str]:
    """How many groups are ready by the operator."""
    return {series("stageline_operator_model_ready_replicas", **OBJECT, pod="operator-0"): ready}


def latency(name: str, bound: str, quick: str, every: str) -> dict[str, str]:
    """A histogram with one bound that matters; how many were within it, and how many there were."""
    labels = {**MODEL, "pod": "gateway-0"}
    return {
        series(f"{name}_bucket", **labels, le="0.01"): "0x400",
        series(f"{name}_bucket", **labels, le=bound): quick,
        series(f"{name}_bucket", **labels, le="+Inf"): every,
        series(f"{name}_count", **labels): every,
    }


def answers(good: str, failed: str, wrong: str = "0x400") -> dict[str, str]:
    """Requests by status."""
    codes = {"200": good, "503": failed, "400": wrong}
    return {
        series("stageline_gateway_requests_total", **MODEL, pod="gateway-0", code=code): values
        for code, values in codes.items()
    }


def burns(alert: str, value: str, *windows: str) -> tuple[Firing, ...]:
    """The rules of a budget that fire, by their long windows."""
    return tuple(Firing(alert, MODEL, value, window=window) for window in windows)


FIRST_TOKEN: Final = "stageline_time_to_first_token_seconds"
OUTPUT_TOKEN: Final = "stageline_request_time_per_output_token_seconds"

PRESENCE: Final = (
    Scenario(
        "the only group is lost on a machine without an operator, and comes back",
        groups("1x39 0x40 1x20", "0x39 1x40 0x20"),
        {"10m30s": (), "12m": _NO_GROUP, "19m": _NO_GROUP, "21m": ()},
    ),
    Scenario(
        "a group whose pods are gone is missed for as long as the operator wants it",
        groups("1x39 0x700", "0x740") | wanted("1x740"),
        {"13m": _NO_GROUP, "2h30m": _NO_GROUP},
        evaluated_every="1m",
    ),
    Scenario(
        "a group is made anew within a minute",
        groups("1x39 0x1 1x40", "0x39 1x1 0x40") | wanted("1x400"),
        {"10m30s": (), "11m": (), "12m": ()},
        spares=("StagelineNoReadyGroup",),
    ),
    Scenario(
        "a suspended model drains its group, then has none",
        groups("1x39 0x300", "0x39 1x100 0x200") | wanted("1x38 0x300"),
        {"12m": (), "30m": (), "50m": ()},
        spares=("StagelineNoReadyGroup",),
    ),
    Scenario(
        "a new model is given half an hour to load",
        groups("0x200", "1x200") | wanted("1x200"),
        {"5m": (), "29m": (), "32m": _NO_GROUP},
    ),
    Scenario(
        "no gateway serves the namespace of a model whose only group is lost, and comes back",
        wanted("1x100") | on_record("1x39 0x40 1x20"),
        {"10m30s": (), "12m": _NO_GROUP, "19m": _NO_GROUP, "21m": ()},
    ),
    Scenario(
        "the gateway forgets a model with its pods, and the operator goes on missing it",
        groups("1x39 stale _x60", "0x39 stale _x60") | wanted("1x100") | on_record("1x39 0x60"),
        {"10m30s": (), "13m": _NO_GROUP, "20m": _NO_GROUP},
    ),
    Scenario(
        "without a gateway a new model is given half an hour to load",
        wanted("1x200") | on_record("0x200"),
        {"5m": (), "29m": (), "33m": _NO_GROUP},
    ),
    Scenario(
        "without a gateway a model is suspended, and has half an hour to load when it is wanted again",
        wanted("1x39 0x40 1x300") | on_record("1x38 0x400"),
        {"12m": (), "25m": (), "48m": (), "53m": _NO_GROUP},
        spares=("StagelineNoReadyGroup",),
    ),
    Scenario(
        "a gateway that sees a ready group is believed before the operator's record",
        groups("1x200", "0x200") | wanted("1x200") | on_record("1x40 0x160"),
        {"15m": (), "45m": ()},
        spares=("StagelineNoReadyGroup",),
    ),
    Scenario(
        "the only gateway goes, and one of two",
        {
            series("up", job="stageline-gateway", instance="a:8081", namespace="team", pod="gateway-0"): "1x40 0x100",
            series("up", job="stageline-gateway", instance="b:8081", namespace="other", pod="gateway-0"): "1x40 0x100",
            series("up", job="stageline-gateway", instance="c:8081", namespace="other", pod="gateway-1"): "1x140",
        },
        {
            "11m": (),
            "13m": (Firing("StagelineGatewayDown", {"namespace": "team"}),),
        },
        spares=("StagelineTargetDown",),
    ),
    Scenario(
        "without an operator a gateway that vanished with its pods is missed for six hours",
        {
            series("up", job="stageline-gateway", instance="a:8081", namespace="team", pod="gateway-0"): "1x5 _x200",
        },
        {
            "8m": (),
            "20m": (Firing("StagelineGatewayDown", {"namespace": "team"}),),
            "6h20m": (),
        },
        step="2m",
        evaluated_every="2m",
    ),
    Scenario(
        "a gateway that the operator was told of vanished with its pods a day ago; another was removed as planned; a "
        "third is new",
        {
            series("up", job="stageline-gateway", instance="a:8081", namespace="team", pod="gateway-0"): "1x5 _x800",
            series("up", job="stageline-gateway", instance="b:8081", namespace="other", pod="gateway-0"): "1x5 _x800",
            series("stageline_operator_gateway_expected", namespace="team", pod="operator-0"): "1x805",
            series("stageline_operator_gateway_expected", namespace="other", pod="operator-0"): "1x5 stale _x800",
            series("stageline_operator_gateway_expected", namespace="new", pod="operator-0"): "_x590 1x215",
            series("stageline_operator_leader", pod="operator-0"): "1x805",
        },
        {
            "20m": (Firing("StagelineGatewayDown", {"namespace": "team"}),),
            "20h": (Firing("StagelineGatewayDown", {"namespace": "team"}),),
            "21h": (
                Firing("StagelineGatewayDown", {"namespace": "team"}),
                Firing("StagelineGatewayDown", {"namespace": "new"}),
            ),
        },
        spares=("StagelineGatewayDown",),
        step="2m",
        evaluated_every="2m",
    ),
    Scenario(
        "one gateway of two namespaces serves one of them no more, and later neither",
        {
            series(
                "up", job="stageline-gateway", instance="a:8081", namespace="system", pod="gateway-0"
            ): "1x100 stale _x99",
            series("stageline_gateway_endpoints_stale", namespace="team-a", pod="gateway-0"): "0x100 stale _x99",
            series("stageline_gateway_endpoints_stale", namespace="team-b", pod="gateway-0"): "0x20 stale _x179",
            series("stageline_operator_gateway_expected", namespace="team-a", pod="operator-0"): "1x200",
            series("stageline_operator_gateway_expected", namespace="team-b", pod="operator-0"): "1x200",
            series("stageline_operator_leader", pod="operator-0"): "1x200",
        },
        {
            "4m": (),
            "20m": (Firing("StagelineGatewayDown", {"namespace": "team-b"}),),
            "40m": tuple(Firing("StagelineGatewayDown", {"namespace": name}) for name in ("team-a", "team-b")),
        },
        spares=("StagelineTargetDown",),
    ),
)

ALL_WINDOWS: Final = ("1h", "6h", "1d", "3d")

BUDGETS: Final = (
    Scenario(
        "half of the requests fail, for hours",
        answers("0+10x130", "0+10x130"),
        {
            "10m": burns("StagelineFailureBudgetBurn", "50%", "1h"),
            "50m": burns("StagelineFailureBudgetBurn", "50%", "1h", "6h"),
            "4h": burns("StagelineFailureBudgetBurn", "50%", *ALL_WINDOWS),
        },
        step="2m",
        evaluated_every="2m",
    ),
    Scenario(
        "four requests fail at night, and a hundred of clients are wrong",
        answers("0+1x240", "0x10 1x10 2x10 3x10 4x200", "0+10x240"),
        {"6m": (), "30m": ()},
        spares=("StagelineFailureBudgetBurn",),
    ),
    Scenario(
        "every first token comes after 2 s, for hours",
        latency(FIRST_TOKEN, "2.0", "0x130", "0+10x130"),
        {
            "10m": burns("StagelineFirstTokenBudgetBurn", "100%", "1h"),
            "4h": burns("StagelineFirstTokenBudgetBurn", "100%", *ALL_WINDOWS),
        },
        step="2m",
        evaluated_every="2m",
    ),
    Scenario(
        "a model of one name in two clusters: first tokens are late in one of them",
        {
            series(name, **{**MODEL, "cluster": cluster}, **rest): values
            for cluster, quick in (("east", "0x30"), ("west", "0+10x30"))
            for name, rest, values in (
                (f"{FIRST_TOKEN}_bucket", {"le": "2.0"}, quick),
                (f"{FIRST_TOKEN}_bucket", {"le": "+Inf"}, "0+10x30"),
                (f"{FIRST_TOKEN}_count", {}, "0+10x30"),
                ("stageline_gateway_requests_total", {"code": "200"}, "0+10x30"),
            )
        },
        {"12m": (Firing("StagelineFirstTokenBudgetBurn", {**MODEL, "cluster": "east"}, "100%", window="1h"),)},
        spares=("StagelineFirstTokenBudgetBurn",),
        step="1m",
        evaluated_every="1m",
    ),
    Scenario(
        "first tokens come late for ten minutes and then in time: long windows remember it, short ones don't",
        latency(FIRST_TOKEN, "2.0", "0x20 0+10x100", "0+10x120"),
        {"8m": burns("StagelineFirstTokenBudgetBurn", "100%", "1h"), "48m": ()},
        spares=("StagelineFirstTokenBudgetBurn",),
        step="30s",
    ),
    Scenario(
        "one first token in twenty comes late: five times the budget, over two hours",
        latency(FIRST_TOKEN, "2.0", "0+19x130", "0+20x130"),
        {"50m": (), "1h40m": burns("StagelineFirstTokenBudgetBurn", "5%", "1d")},
        step="1m",
        evaluated_every="1m",
    ),
    Scenario(
        "every answer comes slowly, token by token, for hours",
        latency(OUTPUT_TOKEN, "0.15", "0x130", "0+10x130"),
        {
            "10m": burns("StagelineOutputTokenBudgetBurn", "100%", "1h"),
            "4h": burns("StagelineOutputTokenBudgetBurn", "100%", *ALL_WINDOWS),
        },
        step="2m",
        evaluated_every="2m",
    ),
    Scenario(
        "two answers in a hundred come slowly, for hours: the budget lasts half as long as it should",
        latency(OUTPUT_TOKEN, "0.15", "0+98x130", "0+100x130"),
        {"2h": (), "4h": burns("StagelineOutputTokenBudgetBurn", "2%", "3d")},
        step="2m",
        evaluated_every="2m",
    ),
    Scenario(
        "one answer in two hundred comes slowly: half of what the budget allows",
        latency(OUTPUT_TOKEN, "0.15", "0+199x130", "0+200x130"),
        {"4h": ()},
        spares=("StagelineOutputTokenBudgetBurn",),
        step="2m",
        evaluated_every="2m",
    ),
)
