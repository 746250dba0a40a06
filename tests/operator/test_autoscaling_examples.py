"""The examples for autoscalers name a resource that can be scaled, and a metric that engines have."""

import json
from typing import Any

import pytest
import yaml

from processes.repository_files import ROOT
from stageline_api.resource import pipeline_model
from stageline_runtime.engine.telemetry.metrics import EngineMetrics

FILES = sorted((ROOT / "examples" / "autoscaling").glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_an_autoscaler_scales_groups_by_a_metric_of_their_engines(file: Any) -> None:
    manifest = yaml.safe_load(file.read_text())
    target = manifest["spec"]["scaleTargetRef"]
    assert (target["apiVersion"], target["kind"]) == (pipeline_model.API_VERSION, pipeline_model.KIND)
    exposed = {f"{family.name}" for family in EngineMetrics("smollm2").registry.collectors.collect()}
    assert any(name in json.dumps(manifest["spec"]) for name in exposed), exposed
