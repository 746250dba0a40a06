"""Services of a model: stages find each other by one, clients find the engines by the other."""

from typing import Any

from stageline_api import labels, ports
from stageline_api.resource.pipeline_model import PipelineModel
from stageline_operator.planner.objects.identity import engine_service_name, headless_service_name, object_metadata


def build_headless_service(model: PipelineModel) -> dict[str, Any]:
    """Gives every stage pod a DNS name, also before it is ready: stages must meet in order to become ready."""
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
    """The engines of ready groups: they run in the pods of stage 0."""
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


def _port(name: str, number: int) -> dict[str, Any]:
    return {"name": name, "port": number, "targetPort": number, "protocol": "TCP"}
