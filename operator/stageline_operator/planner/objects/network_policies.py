"""NetworkPolicies of a model: which peers may connect to its pods. All other ingress is denied.

Stages of one incarnation reach each other on all ports: stages listen on free ports, and Gloo and NCCL choose theirs. A
policy can't express "of my incarnation", so each incarnation has its own policy. Egress stays open: models are fetched
from anywhere. Policies add up, so a user's own policy may close it (examples/network).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from stageline_api import labels, ports
from stageline_api.resource.pipeline_model import PipelineModel
from stageline_operator.planner.objects.identity import GroupIncarnation, incarnation_policy_name, object_metadata
from stageline_operator.planner.types import Peers, Setting


def build_incarnation_policy(model: PipelineModel, life: GroupIncarnation) -> dict[str, Any]:
    """Pods of one incarnation reach each other, but no other incarnation's pods."""
    own = {
        labels.MODEL: model.name,
        labels.GROUP: str(life.group),
        labels.INCARNATION: str(life.incarnation),
    }
    rule = {"from": [{"podSelector": {"matchLabels": own}}]}
    return _policy(model, incarnation_policy_name(model, life), own, [rule])


def build_access_policies(model: PipelineModel, setting: Setting) -> list[dict[str, Any]]:
    """The gateway reaches engines. The operator and Prometheus reach the state and metrics of engines and stages.

    The gateway reaches the stages' state as well: its page shows their activity.
    """
    every_stage = {labels.MODEL: model.name}
    stage_zero = every_stage | {labels.STAGE: "0"}
    gateway, watchers = _peer(setting.gateway), [_peer(setting.operator), *setting.metrics_from]
    health = [_rule([gateway, *watchers], ports.STAGE_HEALTH)]
    engine = [_rule([gateway], ports.ENGINE_HTTP), _rule(watchers, ports.ENGINE_STATE)]
    return [
        _policy(model, f"{model.name}-stages", every_stage, health),
        _policy(model, f"{model.name}-engine", stage_zero, engine),
    ]


def _policy(
    model: PipelineModel, name: str, selected: Mapping[str, str], rules: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": object_metadata(model, name, "network"),
        "spec": {
            "podSelector": {"matchLabels": dict(selected)},
            "policyTypes": ["Ingress"],
            "ingress": [dict(rule) for rule in rules],
        },
    }


def _rule(peers: Sequence[Mapping[str, Any]], port: int) -> dict[str, Any]:
    return {"from": [dict(each) for each in peers], "ports": [{"protocol": "TCP", "port": port}]}


def _peer(peers: Peers) -> dict[str, Any]:
    namespaces = {} if peers.namespace is None else {"matchLabels": {"kubernetes.io/metadata.name": peers.namespace}}
    return {"podSelector": {"matchLabels": dict(peers.pod_labels)}, "namespaceSelector": namespaces}
