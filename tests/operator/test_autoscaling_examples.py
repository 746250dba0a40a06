"""The examples for a cluster's autoscalers name a resource that can be scaled, and metrics that are there."""

import json
import re
from typing import Any

import pytest
import yaml

from processes.repository_files import ROOT
from stageline_api.resource import pipeline_model
from stageline_gateway.telemetry import metric_names as gateway_metrics
from stageline_runtime.engine.telemetry.metrics import EngineMetrics

FILES = sorted({*(ROOT / "examples" / "autoscaling").glob("*.yaml")} - {ROOT / "examples/autoscaling/built_in.yaml"})


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_an_autoscaler_scales_groups_by_metrics_that_are_there(file: Any) -> None:
    manifest = yaml.safe_load(file.read_text())
    target = manifest["spec"]["scaleTargetRef"]
    assert (target["apiVersion"], target["kind"]) == (pipeline_model.API_VERSION, pipeline_model.KIND)
    exposed = {family.name for family in EngineMetrics("smollm2").registry.collectors.collect()}
    exposed |= {each.name for each in gateway_metrics.ALL_METRICS}
    asked = set(re.findall(r"stageline_[a-z_]+", json.dumps(manifest["spec"])))
    assert asked, manifest
    assert asked <= exposed, asked - exposed
