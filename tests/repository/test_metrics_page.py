"""docs/metrics.md says what the exporters register, and every list of metrics keeps the conventions."""

import re

import pytest

from boards.metrics_page import METRICS, PAGE, page_with_tables
from stageline_api.telemetry.metric_spec import MetricKind, MetricSpec

EVERY = [spec for specs in METRICS.values() for spec in specs]


def test_the_page_has_every_metric_as_it_is_registered() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == page_with_tables(text), "run make generate"


def test_no_two_metrics_share_a_name() -> None:
    names = [spec.name for spec in EVERY]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("spec", EVERY, ids=lambda spec: spec.name)
def test_a_metric_says_what_it_measures_in_base_units(spec: MetricSpec) -> None:
    assert re.fullmatch(r"stageline(_[a-z0-9]+)+", spec.name)
    assert spec.help.endswith(".")
    assert spec.help[0].isupper() or spec.help[0] in "(1"
    assert not re.search(r"_(ms|millis|minutes|percent|perc|kb|mb|rate|per_second)(_|$)", spec.name)
    assert not {"pod", "instance", "job", "le", "request_id", "exported_stage"} & set(spec.labels)
    assert list(spec.buckets) == sorted(set(spec.buckets))
    if spec.kind is MetricKind.GAUGE:
        assert not spec.name.endswith(("_total", "_count", "_sum", "_bucket"))
