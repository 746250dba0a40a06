"""Panels with Stageline's conventions: each has a title, a description, a unit and the selected data source.

A description defines the measured value and explains how to read it, for first-time readers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from grafana_foundation_sdk.builders import (
    barchart,
    common,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.builders.dashboard import ThresholdsConfig
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models.common import DataSourceRef
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

DATASOURCE: Final = DataSourceRef(type_val="prometheus", uid="${datasource}")
NO_DATA: Final = "No data"
"""The text of a number without samples."""
COUNT: Final = "count"
"""The unit of counts: Grafana's `none`, without fractions, also on axes."""

AnyPanel = timeseries.Panel | stat.Panel | table.Panel | heatmap.Panel | barchart.Panel | statetimeline.Panel
_Panel = TypeVar(
    "_Panel", timeseries.Panel, stat.Panel, table.Panel, heatmap.Panel, barchart.Panel, statetimeline.Panel
)


@dataclass(frozen=True, slots=True)
class Text:
    """Texts of a panel. `unit` is one of Grafana's unit ids, or `COUNT`."""

    title: str
    description: str
    unit: str


@dataclass(frozen=True, slots=True)
class Series:
    """One query of a panel. `legend` is a template of its labels; `color` is for a legend without labels.

    `colors` are for a legend with labels, by the resulting names.
    """

    expr: str
    legend: str
    color: str = ""
    colors: Mapping[str, str] = field(default_factory=dict)

    def fixed_colors(self) -> Mapping[str, str]:
        """Colors by the names of series."""
        return {**self.colors, self.legend: self.color} if self.color else self.colors


@dataclass(frozen=True, slots=True)
class Limits:
    """Thresholds of doubtful and bad values; `low_is_bad` reverses them."""

    doubtful: float
    bad: float
    low_is_bad: bool = False

    def thresholds(self) -> ThresholdsConfig:
        """Green, orange, red."""
        colors = ("red", "orange", "green") if self.low_is_bad else ("green", "orange", "red")
        bounds = (None, *sorted((self.doubtful, self.bad)))
        steps = [models.Threshold(value=bound, color=color) for bound, color in zip(bounds, colors, strict=True)]
        return ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)


def named(panel: _Panel, text: Text) -> _Panel:
    panel.title(text.title).description(text.description).datasource(DATASOURCE)
    return panel.unit("none").decimals(0) if text.unit == COUNT else panel.unit(text.unit)


def _targets(series: Sequence[Series]) -> list[prometheus.Dataquery]:
    return [
        prometheus.Dataquery().ref_id(ref_id(index)).expr(each.expr).legend_format(each.legend).range()
        for index, each in enumerate(series)
    ]


def ref_id(index: int) -> str:
    """A, B, C and so on; Grafana refers to a table's values by it."""
    return chr(ord("A") + index)


def lines(text: Text, *series: Series, stacked: bool = False, limits: Limits | None = None) -> timeseries.Panel:
    """Lines over time, or stacked areas. Gaps stay gaps."""
    panel = named(timeseries.Panel(), text).targets([*_targets(series)]).min(0)
    panel.legend(_legend()).tooltip(_tooltip()).line_width(1).fill_opacity(60 if stacked else 0)
    panel.show_points(common_models.VisibilityMode.NEVER).span_nulls(False)
    if stacked:
        panel.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))
    if limits:
        style = common.GraphThresholdsStyleConfig().mode(common_models.GraphThresholdsStyleMode.DASHED)
        panel.thresholds(limits.thresholds()).thresholds_style(style)
    if text.unit == "percentunit" and stacked:
        panel.max(1)
    for each in series:
        for name, color in each.fixed_colors().items():
            panel.override_by_name(name, [fixed_color(color)])
    return panel


def number(text: Text, expr: str, limits: Limits | None = None, legend: str = "") -> stat.Panel:
    """The current value, large, colored by `limits`; with a `legend` there may be several.

    It is an instant query: a range query would still show the last value of a series that ended half an hour ago.
    """
    panel = _stat(text, expr, legend=legend)
    if legend:
        panel.text_mode(common_models.BigValueTextMode.VALUE_AND_NAME)
    plain = ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps([models.Threshold(value=None, color="blue")])
    return panel.thresholds(limits.thresholds() if limits else plain)


def judged(text: Text, expr: str, broken: str) -> stat.Panel:
    """Like `number` with one value: red while `broken` has a sample, else green.

    For values that are good for one model and bad for another, which a panel's thresholds can't express.
    """
    panel = _stat(text, f"({expr}) unless on () ({broken})", f"({expr}) and on () ({broken})")
    panel.text_mode(common_models.BigValueTextMode.VALUE)
    for index, color in enumerate(("green", "red")):
        panel.override_by_query(ref_id(index), [fixed_color(color)])
    return panel


def _stat(text: Text, *exprs: str, legend: str = "") -> stat.Panel:
    queries = [
        prometheus.Dataquery().ref_id(ref_id(index)).expr(expr).legend_format(legend).instant()
        for index, expr in enumerate(exprs)
    ]
    panel = named(stat.Panel(), text).targets([*queries]).no_value(NO_DATA)
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    return panel.graph_mode(common_models.BigValueGraphMode.NONE).color_mode(common_models.BigValueColorMode.VALUE)


def states(text: Text, series: Series, names: Mapping[int, tuple[str, str]]) -> statetimeline.Panel:
    """One bar per series; its integer values are states: (name, color) of each."""
    panel = named(statetimeline.Panel(), text).targets([*_targets([series])]).span_nulls(False)
    options = {
        str(number): models.ValueMappingResult(text=name, color=color, index=number)
        for number, (name, color) in names.items()
    }
    panel.mappings([models.ValueMap(options=options)]).show_value(common_models.VisibilityMode.AUTO)
    return panel.merge_values(True).row_height(0.8)


def histogram_heatmap(text: Text, expr: str, *, exemplars: bool = False) -> heatmap.Panel:
    """The samples of a histogram over time; the unit is that of the buckets."""
    query = prometheus.Dataquery().ref_id("A").expr(expr).legend_format("{{le}}").range()
    if exemplars:
        query.exemplar(True)
    panel = named(heatmap.Panel(), text).targets([query.format(PromQueryFormat.HEATMAP)]).calculate(False)
    panel.y_axis(heatmap.YAxisConfig().unit(text.unit)).cell_values(heatmap.CellValues().unit("short"))
    return panel.color(_shades("Oranges"))


def rows_heatmap(text: Text, series: Series, low: float, high: float) -> heatmap.Panel:
    """One row per series, from blue at `low` over yellow to red at `high`: shows outliers and when they began."""
    panel = named(heatmap.Panel(), text).targets([*_targets([series])]).calculate(False)
    panel.cell_values(heatmap.CellValues().unit(text.unit)).filter_values(heatmap.FilterValueRange().le(-1))
    return panel.color(_shades("RdYlBu").reverse(True).min(low).max(high).exponent(1))


def _shades(scheme: str) -> heatmap.HeatmapColorOptions:
    mode = heatmap_models.HeatmapColorMode.SCHEME
    return heatmap.HeatmapColorOptions().mode(mode).scheme(scheme).steps(64).exponent(0.5)


def _legend() -> common.VizLegendOptions:
    mode = common_models.LegendDisplayMode.TABLE
    legend = common.VizLegendOptions().display_mode(mode).placement(common_models.LegendPlacement.BOTTOM)
    return legend.show_legend(True).calcs(["lastNotNull", "max"])


def _tooltip() -> common.VizTooltipOptions:
    order = common_models.SortOrder.DESCENDING
    return common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI).sort(order)


def fixed_color(color: str) -> models.DynamicConfigValue:
    return models.DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": color})
