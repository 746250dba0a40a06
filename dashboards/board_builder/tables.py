"""Tables and bars of current values: several instant queries, joined by their common labels."""

from collections.abc import Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import barchart, common, prometheus, table
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from board_builder.panels import Limits, Series, Text, fixed_color, named, ref_id


@dataclass(frozen=True, slots=True)
class Column:
    """A column: a query with one value for each of the table's keys."""

    header: str
    expr: str
    unit: str
    limits: Limits | None = None


@dataclass(frozen=True, slots=True)
class Key:
    """A label that distinguishes the rows; `url` is the link of its cells."""

    label: str
    header: str
    url: str = ""
    link_title: str = ""


def rows(text: Text, keys: Sequence[Key], columns: Sequence[Column], sort: str = "") -> table.Panel:
    """One row per combination of keys, sorted by the column `sort`, worst first; per cluster if series have
    that label.
    """
    panel = named(table.Panel(), text).targets([_instant(i, each.expr) for i, each in enumerate(columns)])
    headers = {key.label: key.header for key in keys}
    headers = {"cluster": "Cluster"} | headers if "cluster" not in headers else headers
    headers |= {_value_field(index, len(columns)): column.header for index, column in enumerate(columns)}
    panel.with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
    panel.with_transformation(_only(headers))
    for key in keys:
        if key.url:
            link = {"title": key.link_title, "url": key.url, "targetBlank": False}
            panel.override_by_name(key.header, [models.DynamicConfigValue(id_val="links", value=[link])])
    for column in columns:
        panel.override_by_name(column.header, _look(column))
    if sort:
        panel.sort_by([common.TableSortByFieldState().display_name(sort).desc(True)])
    return panel


def stacked_bars(text: Text, axis_label: str, *series: Series) -> barchart.Panel:
    """One bar per value of `axis_label`, stacked from the series; all of them have that one label."""
    panel = named(barchart.Panel(), text).targets([_instant(i, each.expr) for i, each in enumerate(series)])
    headers = {axis_label: axis_label}
    headers |= {_value_field(index, len(series)): each.legend for index, each in enumerate(series)}
    panel.with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
    panel.with_transformation(_only(headers))
    order = {"fields": {}, "sort": [{"field": axis_label}]}
    panel.with_transformation(models.DataTransformerConfig(id_val="sortBy", options=order))
    for each in series:
        panel.override_by_name(each.legend, [fixed_color(each.color)])
    panel.x_field(axis_label).stacking(common_models.StackingMode.NORMAL).fill_opacity(80)
    legend = common.VizLegendOptions().display_mode(common_models.LegendDisplayMode.LIST).show_legend(True)
    panel.legend(legend.placement(common_models.LegendPlacement.BOTTOM).calcs([]))
    return panel.orientation(common_models.VizOrientation.VERTICAL).min(0)


def _instant(index: int, expr: str) -> prometheus.Dataquery:
    query = prometheus.Dataquery().ref_id(ref_id(index)).expr(expr).instant()
    return query.format(PromQueryFormat.TABLE)


def _value_field(index: int, queries: int) -> str:
    """Grafana's field name for the values of one of several queries, or of a single one."""
    return f"Value #{ref_id(index)}" if queries > 1 else "Value"


def _only(headers: dict[str, str]) -> models.DataTransformerConfig:
    """Rename the fields of `headers`, in their order; Prometheus' own are hidden."""
    order = {field: index for index, field in enumerate(headers)}
    options = {"excludeByName": {"Time": True}, "indexByName": order, "renameByName": headers}
    return models.DataTransformerConfig(id_val="organize", options=options)


def _look(column: Column) -> list[models.DynamicConfigValue]:
    look = [models.DynamicConfigValue(id_val="unit", value=column.unit)]
    if column.limits:
        cell = {"type": "color-text"}
        look.append(models.DynamicConfigValue(id_val="custom.cellOptions", value=cell))
        look.append(models.DynamicConfigValue(id_val="thresholds", value=column.limits.thresholds().build()))
    return look
