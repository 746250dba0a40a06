"""The real endpoints export exactly what the lists of metrics say, in a form that promtool finds nothing wrong with."""

import shutil
import subprocess
from collections.abc import Mapping

import pytest
from prometheus_client.parser import text_string_to_metric_families

from boards.exported_names import exported_labels, exported_names, missing_names
from boards.metrics_page import METRICS
from stageline_api.telemetry.metric_spec import sample_names

COMPONENT = pytest.mark.parametrize("component", METRICS)


@COMPONENT
def test_an_endpoint_exports_its_list_and_nothing_else(component: str, exported_pages: Mapping[str, str]) -> None:
    assert exported_names({component: exported_pages[component]}) == sample_names(METRICS[component])


@COMPONENT
def test_each_family_has_its_type_its_help_and_its_labels(component: str, exported_pages: Mapping[str, str]) -> None:
    families = {one.name: one for one in text_string_to_metric_families(exported_pages[component])}
    labels = exported_labels({component: exported_pages[component]})
    for spec in METRICS[component]:
        assert (families[spec.family].type, families[spec.family].documentation) == (spec.kind, spec.help)
        for name in spec.sample_names:
            assert labels.get(name, frozenset(spec.labels)) - {"le"} == frozenset(spec.labels), name


def test_what_no_scrape_of_a_healthy_system_may_lack_has_samples(exported_pages: Mapping[str, str]) -> None:
    """Names alone would be there without a single value; these have one after one answer of one group."""
    rare = {
        "stageline_engine_refusals_total", "stageline_p2p_latency_seconds", "stageline_gateway_refusals_total",
        "stageline_gateway_key_tokens_total", "stageline_gateway_tls_certificate_expiry_timestamp_seconds",
        "stageline_operator_group_failures_total", "stageline_operator_group_restarts_total",
        "stageline_operator_relist_corrections_total", "stageline_operator_gateway_expected",
        "stageline_operator_unreadable",
        "stageline_engine_accepted_tokens_per_position_total",
    }  # fmt: skip
    sampled = exported_labels(exported_pages).keys()
    specs = [spec for specs in METRICS.values() for spec in specs if spec.name not in rare]
    assert [spec.name for spec in specs if spec.sample_names[0] not in sampled] == []


def test_a_name_that_nothing_exports_is_seen(exported_pages: Mapping[str, str]) -> None:
    used = ["stageline_stage_busy_seconds_total", "stageline_stage_busy_seconds", "up", "stageline_e2e_seconds_bucket"]
    assert missing_names(used, exported_pages) == ["stageline_e2e_seconds_bucket", "stageline_stage_busy_seconds"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is missing: apt-get install prometheus")
@COMPONENT
def test_promtool_finds_nothing_wrong(component: str, exported_pages: Mapping[str, str]) -> None:
    promtool = ["promtool", "check", "metrics"]
    done = subprocess.run(promtool, input=exported_pages[component], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
