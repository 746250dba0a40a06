// Bar charts of what holds now: one bar per row of a table, its series on top of each other.

import { axisLook, plainLayout, valueAxis } from "./axes.js";
import { drawLegend, halves, QUIETLY } from "./charts.js";
import { configOf, seriesColour, textOf } from "./fields.js";
import { tableOf } from "./tables.js";

/** Draws the rows of `answers`: the panel's `xField` names the bars, every column of numbers is a series. */
export function drawBarChart(body, panel, answers) {
  const { plot, legend } = halves(body);
  const { columns, rows, refIds } = tableOf(panel, answers);
  const labels = rows.map((row) => String(row[panel.options.xField] ?? ""));
  const series = columns
    .filter((name) => rows.some((row) => typeof row[name] === "number"))
    .map((name) => ({
      name,
      config: configOf(panel, name, refIds[name]),
      values: rows.map((row) => row[name] ?? null),
    }));
  const heights = rows.map((_, at) => series.reduce((sum, each) => sum + (each.values[at] ?? 0), 0));
  const traces = series.map(({ name, config, values }, order) => ({
    type: "bar",
    x: labels,
    y: values,
    name,
    marker: { color: seriesColour(config, order) },
    text: values.map((value) => textOf(config, value)),
    textposition: "none",
    hovertemplate: "%{text}",
  }));
  const layout = {
    ...plainLayout(),
    hovermode: "x unified",
    barmode: "stack",
    bargap: 0.35,
    xaxis: { ...axisLook(), type: "category", showgrid: false },
    yaxis: { ...axisLook(), ...valueAxis(0, Math.max(...heights), series[0].config) },
  };
  drawLegend(legend, panel, series);
  Plotly.react(plot, traces, layout, QUIETLY);
}
