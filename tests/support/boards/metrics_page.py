"""The tables of docs/metrics.md, made from the lists that the exporters register from.

`python -m boards.metrics_page`, with tests/support on the path, writes them; a test compares the two.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from processes.repository_files import ROOT
from stageline_api.telemetry import metric_buckets
from stageline_api.telemetry.metric_spec import Buckets, MetricSpec
from stageline_gateway.telemetry import metric_names as gateway_names
from stageline_operator.controller.telemetry import metric_names as operator_names
from stageline_runtime import metric_names as runtime_names

PAGE: Final = ROOT / "docs" / "metrics.md"
METRICS: Final[Mapping[str, Sequence[MetricSpec]]] = {
    "stage": runtime_names.STAGE_METRICS,
    "rank": runtime_names.RANK_METRICS,
    "engine": runtime_names.ENGINE_METRICS,
    "gateway": gateway_names.ALL_METRICS,
    "operator": operator_names.ALL_METRICS,
}
"""By component; each has a table of its own on the page."""


def table_of(specs: Sequence[MetricSpec]) -> str:
    """Markdown: a row for each metric."""
    rows = [
        f"|`{spec.name}`|{spec.kind}|{' '.join(f'`{label}`' for label in spec.labels)}|{spec.help}|" for spec in specs
    ]
    return "\n".join(["|Metric|Type|Labels|Description|", "|---|---|---|---|", *rows]) + "\n"


def buckets_table() -> str:
    """Markdown: a row for each family of buckets."""
    families = {name: value for name, value in vars(metric_buckets).items() if name.isupper()}
    rows = [f"|{', '.join(_used_by(bounds))}|{_range(bounds)}|" for bounds in families.values()]
    return "\n".join(["|Histograms|Bounds|", "|---|---|", *rows]) + "\n"


def page_with_tables(text: str) -> str:
    """The page with its tables as they should be."""
    for name, specs in METRICS.items():
        text = _replaced(text, name, table_of(specs))
    return _replaced(text, "buckets", buckets_table())


def _used_by(bounds: Buckets) -> list[str]:
    return [f"`{spec.name}`" for specs in METRICS.values() for spec in specs if spec.buckets is bounds]


def _range(bounds: Buckets) -> str:
    return " ".join(f"{bound:g}" for bound in bounds)


def _replaced(text: str, name: str, table: str) -> str:
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found, rest = text.partition(begin)
    assert found, f"{PAGE.name} lacks {begin}"
    return f"{before}{begin}\n{table}{end}{rest.partition(end)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
