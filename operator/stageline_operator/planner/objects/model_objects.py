"""Objects that all groups of a model share: two Services, two Secrets, and the PodDisruptionBudget."""

from typing import Any, Final

from stageline_api import engine_access, labels, ports
from stageline_api.resource.pipeline_model import PipelineModel
from stageline_operator.planner.objects.identity import (
    bus_secret_name,
    disruption_budget_name,
    engine_service_name,
    headless_service_name,
    model_labels,
    object_metadata,
)

TOKEN_KEY: Final = "token"


def build_headless_service(model: PipelineModel) -> dict[str, Any]:
    """Gives every stage pod a DNS name, even before it is ready: stages must connect to become ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": object_metadata(model, headless_service_name(model), "stage"),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {labels.MODEL: model.name},
            "ports": [
                _port("rendezvous", ports.RENDEZVOUS),
                _port("plan-bus", ports.PLAN_BUS),
                _port("health", ports.STAGE_HEALTH),
            ],
        },
    }


def build_engine_service(model: PipelineModel) -> dict[str, Any]:
    """The engines of ready groups; they run in the pods of stage 0."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": object_metadata(model, engine_service_name(model), "engine"),
        "spec": {
            "type": "ClusterIP",
            "selector": {labels.MODEL: model.name, labels.STAGE: "0"},
            "ports": [_port("http", ports.ENGINE_HTTP)],
        },
    }


def build_bus_secret(model: PipelineModel, random_token: str) -> dict[str, Any]:
    """Holds `random_token`, drawn by the caller. Created once: another token would lock out running stages."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": object_metadata(model, bus_secret_name(model), "bus"),
        "type": "Opaque",
        "immutable": True,
        "stringData": {TOKEN_KEY: random_token},
    }


def build_engine_keys_secret(model: PipelineModel, random_key: str) -> dict[str, Any]:
    """Holds `random_key`, drawn by the caller, for all models of the namespace; so no model owns it.

    Created once; users may change it (`engine_access`).
    """
    no_model = model_labels(model, "engine")
    for name in (labels.APP_INSTANCE, labels.MODEL):
        del no_model[name]
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": engine_access.KEYS_SECRET, "namespace": model.namespace, "labels": no_model},
        "type": "Opaque",
        "stringData": {engine_access.KEYS_ENTRY: random_key},
    }


def build_disruption_budget(model: PipelineModel, kept_pods: int) -> dict[str, Any]:
    """Keep `kept_pods` of the ready pods.

    `minAvailable` is a number: `maxUnavailable` would count the scale of the PipelineModel, in groups instead of pods.
    Unready pods may always be evicted: a group that doesn't serve must not block a node drain.
    """
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": object_metadata(model, disruption_budget_name(model), "stage"),
        "spec": {
            "minAvailable": kept_pods,
            "selector": {"matchLabels": {labels.MODEL: model.name}},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def _port(name: str, number: int) -> dict[str, Any]:
    return {"name": name, "port": number, "targetPort": number, "protocol": "TCP"}
