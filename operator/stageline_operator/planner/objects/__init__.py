"""Builders of the Kubernetes objects of a PipelineModel: plain manifests, the same for a cluster and for local mode."""

from stageline_operator.planner.objects.config import build_config, build_config_map
from stageline_operator.planner.objects.gang_objects import build_pod_group
from stageline_operator.planner.objects.identity import GroupIncarnation, revision_of
from stageline_operator.planner.objects.model_objects import (
    build_bus_secret,
    build_disruption_budget,
    build_engine_keys_secret,
    build_engine_service,
    build_headless_service,
)
from stageline_operator.planner.objects.network_policies import build_access_policies, build_incarnation_policy
from stageline_operator.planner.objects.stage_pod import build_stage_pod

__all__ = [
    "GroupIncarnation",
    "build_access_policies",
    "build_bus_secret",
    "build_config",
    "build_config_map",
    "build_disruption_budget",
    "build_engine_keys_secret",
    "build_engine_service",
    "build_headless_service",
    "build_incarnation_policy",
    "build_pod_group",
    "build_stage_pod",
    "revision_of",
]
