// Heatmaps over time: buckets of a histogram, or one row per series.

import { axisLook, timeLayout } from "./axes.js";
import { eventShapes, plotBox, QUIETLY } from "./charts.js";
import { cssValue } from "./elements.js";
import { scaleOf } from "./colours.js";
import { format } from "./units.js";

/** Draws `frames`; where the query says `format: heatmap` they are cumulative buckets with a label `le`. */
export function drawHeatmap(body, panel, frames, window, events) {
  if (!body.querySelector(".plot")) body.replaceChildren(plotBox());
  const { color, cellValues, yAxis } = panel.options;
  const rows = frames.some((frame) => "le" in frame.labels) ? bucketRows(frames, yAxis.unit) : seriesRows(frames);
  const cells = rows.map((row) => row.values.map((value) => (value === 0 && row.counts ? null : value)));
  const range = colourRange(color, rows);
  const anchors = color.reverse ? scaleOf(color.scheme).reverse() : scaleOf(color.scheme);
  const { unit } = cellValues;
  const trace = {
    type: "heatmap",
    x: rows[0].times,
    y: rows.map((_, at) => at),
    z: cells,
    text: rows.map((row) => row.values.map((value) => `${row.name}: ${format(value, unit)}`)),
    hovertemplate: "%{x|%H:%M:%S} UTC<br>%{text}<extra></extra>",
    zmin: range.least,
    zmax: range.most,
    xgap: rows[0].times.length > 80 ? 0 : 1,
    ygap: 1,
    colorscale: anchors.map((css, at) => [at / (anchors.length - 1), css]),
    showscale: true,
    colorbar: colourBar(unit, range),
  };
  const layout = {
    ...timeLayout(window),
    yaxis: { ...axisLook(), ...rowAxis(rows) },
    shapes: eventShapes(events, window),
  };
  Plotly.react(body.querySelector(".plot"), [trace], layout, QUIETLY);
}

/** Counts per bucket, from counts of everything up to a bound. Bounds that nothing reaches are left out. */
function bucketRows(frames, unit) {
  const bounds = frames.map((frame) => ({
    frame,
    bound: frame.labels.le === "+Inf" ? Infinity : Number(frame.labels.le),
  }));
  bounds.sort((a, b) => a.bound - b.bound);
  const rows = bounds.map(({ frame, bound }, at) => ({
    ...frame,
    counts: true,
    name: at ? `${format(bounds[at - 1].bound, unit)} – ${format(bound, unit)}` : `≤ ${format(bound, unit)}`,
    bound: format(bound, unit),
    values: frame.values.map((value, n) =>
      value === null ? null : Math.max(0, value - (bounds[at - 1]?.frame.values[n] ?? 0)),
    ),
  }));
  const used = rows.map((row) => row.values.some((value) => value > 0));
  const [first, last] = [used.indexOf(true), used.lastIndexOf(true)];
  return first < 0 ? rows : rows.slice(Math.max(0, first - 1), last + 2);
}

function seriesRows(frames) {
  const sorted = [...frames].sort((a, b) => a.name.localeCompare(b.name, undefined, { numeric: true }));
  return sorted.map((frame) => ({ ...frame, counts: false, bound: frame.name }));
}

function colourRange({ min, max }, rows) {
  const known = rows.flatMap((row) => row.values).filter((value) => Number.isFinite(value));
  return { least: min ?? Math.min(0, ...known), most: max ?? Math.max(...known, 1e-9) };
}

function colourBar(unit, { least, most }) {
  const ticks = [least, (least + most) / 2, most];
  return {
    thickness: 10,
    outlinewidth: 0,
    tickvals: ticks,
    ticktext: ticks.map((tick) => format(tick, unit)),
    tickfont: { size: 10, color: cssValue("--quiet") },
    len: 1,
    x: 1.0,
    xpad: 6,
  };
}

/** A label on every row, or on every second, third… when there are many. */
function rowAxis(rows) {
  const every = Math.ceil(rows.length / 12);
  const shown = rows.map((_, at) => at).filter((at) => at % every === 0);
  return {
    tickvals: shown,
    ticktext: shown.map((at) => rows[at].bound),
    showgrid: false,
    range: [-0.5, rows.length - 0.5],
  };
}
