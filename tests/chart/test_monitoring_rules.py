"""The rules as a cluster gets them: those of the files, but for the objectives and the runbooks' address."""

import json
from typing import Any

import helm_python
import pytest
import yaml

from cluster.rendered_chart import CHART, NOTES, of_kind, rendered_files, rendered_objects, rendered_rules
from stageline_api.telemetry import metric_buckets
from stageline_dashboards.shipped import rule_paths

FILES = {
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8").replace("runbook_url: docs/", "runbook: docs/"))
    for path in rule_paths()
}
"""The shipped rules; without an address, runbooks are paths and no links."""


def test_by_default_each_file_becomes_one_object_and_nothing_but_the_runbooks_annotation_changes() -> None:
    rendered = rendered_rules()
    assert rendered == FILES
    assert "{{ $labels.stage }}" in json.dumps(rendered), "Helm took the alerts' templates for its own"
    assert (CHART / "rules").is_symlink(), "the chart's rules are the shipped ones, not a copy"


def test_rules_are_there_only_where_prometheus_rules_are_known() -> None:
    assert of_kind(rendered_objects({"monitoring": {"rules": "auto"}}), "PrometheusRule") == []
    assert of_kind(rendered_objects({"monitoring": {"rules": "never"}}), "PrometheusRule") == []


def test_a_second_release_brings_no_rules_and_dashboards_of_its_own() -> None:
    """Else every recorded series would be written twice, the objectives' too, which know no namespace."""
    for monitoring in ({}, {"rules": "always", "monitors": "always"}):
        objects = rendered_objects({"operator": {"enabled": False}, "monitoring": monitoring}, namespace="team-b")
        assert of_kind(objects, "PrometheusRule") == []
        assert of_kind(objects, "ConfigMap") == []
        assert len(of_kind(objects, "ServiceMonitor")) == len(monitoring) // 2, "its gateway is scraped all the same"


@pytest.mark.parametrize(
    ("values", "is_said"),
    [
        ({}, True),
        ({"monitoring": {"runbooksUrl": "https://wiki.example/runbooks"}}, False),
        ({"operator": {"enabled": False}}, False),
    ],
    ids=["nowhere", "served", "another gateway"],
)
def test_notes_say_that_runbook_links_lead_nowhere_until_runbooks_are_served(
    values: dict[str, Any], is_said: bool
) -> None:
    assert ("monitoring.runbooksUrl" in rendered_files(values)[NOTES]) is is_said


def test_objectives_change_their_constants_and_nothing_else() -> None:
    wanted = {
        "firstTokenSeconds": 0.5,
        "outputTokenSeconds": 0.04,
        "slowRequestRatio": 0.05,
        "failedRequestRatio": 1e-05,
    }
    rendered = rendered_rules(objectives=wanted)
    assert rendered | {"objectives": FILES["objectives"]} == FILES
    (group,) = rendered["objectives"]["groups"]
    (shipped,) = FILES["objectives"]["groups"]
    changed = {
        rule["record"]: rule["expr"]
        for rule, before in zip(group["rules"], shipped["rules"], strict=True)
        if rule != before
    }
    assert changed == {
        "stageline:first_token_seconds:objective": "vector(0.5)",
        "stageline:output_token_seconds:objective": "vector(0.04)",
        "stageline:slow_request_ratio:objective": "vector(0.05)",
        "stageline:failed_request_ratio:objective": "vector(1e-05)",
    }


@pytest.mark.parametrize("address", ["https://wiki.example/runbooks", "https://wiki.example/runbooks/"])
def test_alerts_lead_to_where_the_runbooks_are_served(address: str) -> None:
    rendered = rendered_rules(runbooksUrl=address)
    urls = [
        rule["annotations"].pop("runbook_url")
        for spec in rendered.values()
        for group in spec["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]
    assert len(urls) > 20
    assert all(url.startswith("https://wiki.example/runbooks/Stageline") for url in urls)


def test_alerts_have_no_runbook_link_without_an_address() -> None:
    text = json.dumps(rendered_rules())
    assert "runbook_url" not in text
    assert text.count('"runbook": "docs/runbooks/Stageline') > 20


def test_a_threshold_that_no_bucket_ends_at_is_refused() -> None:
    bounds = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))["definitions"]
    assert bounds["firstTokenSeconds"]["enum"] == list(metric_buckets.FIRST_TOKEN)
    assert bounds["outputTokenSeconds"]["enum"] == list(metric_buckets.TOKEN_GAP)
    with pytest.raises(helm_python.HelmValuesError, match="firstTokenSeconds"):
        rendered_rules(objectives={"firstTokenSeconds": 3})
