// Panels over time, drawn with plotly: lines and stacks, with thresholds and annotations. Times are UTC.

import { axisLook, timeLayout, valueAxis } from "./axes.js";
import { element } from "./elements.js";
import { colour, faint } from "./colours.js";
import { seriesColour, textOf, thresholdsOf } from "./fields.js";
import { CALC_NAMES, reduce } from "./reducers.js";

export const QUIETLY = { displayModeBar: false };
const FOLLOW_SIZE = new ResizeObserver((entries) => {
  for (const { target } of entries) if (target.matches(".js-plotly-plot")) Plotly.Plots.resize(target);
});

/** Draws `frames` (name, config, times, values) in `body`. */
export function drawTimeSeries(body, panel, frames, window, events) {
  const { plot, legend } = halves(body);
  const { config } = frames[0];
  const stacked = isStacked(config);
  const layout = {
    ...timeLayout(window),
    yaxis: { ...axisLook(), ...axisOf(frames, stacked) },
    hovermode: "x unified",
    shapes: [...thresholdShapes(config), ...eventShapes(events, window)],
  };
  // The legend first: it takes its room from the plot.
  drawLegend(legend, panel, frames);
  Plotly.react(
    plot,
    frames.map((frame, order) => traceOf(frame, order, stacked)),
    layout,
    QUIETLY,
  );
}

/** An element for a plot that follows its own size. */
export function plotBox() {
  const box = element("div", { class: "plot" });
  FOLLOW_SIZE.observe(box);
  return box;
}

/** The plot and its legend, made once per panel: plotly changes a plot that it finds. */
export function halves(body) {
  if (!body.querySelector(".plot")) body.replaceChildren(plotBox(), element("div", { class: "legend" }));
  return { plot: body.querySelector(".plot"), legend: body.querySelector(".legend") };
}

/** The same for all series of a panel. */
function isStacked(config) {
  const { mode = "none" } = config.custom.stacking ?? {};
  if (mode !== "none" && mode !== "normal") throw new Error(`this page does not know stacks by ${mode}`);
  return mode === "normal";
}

function traceOf({ config, times, values, name }, order, stacked) {
  const ink = seriesColour(config, order);
  const opacity = (config.custom.fillOpacity ?? 0) / 100;
  const alone = values.filter((value) => value !== null).length === 1;
  const trace = {
    x: times,
    y: values,
    name,
    text: values.map((value) => textOf(config, value)),
    hovertemplate: "%{text}",
    type: "scatter",
    mode: alone ? "markers" : "lines",
    line: { color: ink, width: config.custom.lineWidth },
    marker: { color: ink, size: 5 },
    connectgaps: false,
  };
  // Without lines: plotly would draw those of series that are gone on top of the others.
  if (stacked) return { ...trace, line: { width: 0 }, stackgroup: "A", fillcolor: faint(ink, Math.max(opacity, 0.55)) };
  // plotly would fill across a gap, as if something had been there.
  const filled = opacity && !hasGap(values) ? { fill: "tozeroy", fillcolor: faint(ink, opacity) } : {};
  return { ...trace, ...filled };
}

function hasGap(values) {
  const first = values.findIndex((value) => value !== null);
  const last = values.findLastIndex((value) => value !== null);
  return values.slice(first, last).includes(null);
}

function axisOf(frames, stacked) {
  const { config } = frames[0];
  const heights = stacked ? totals(frames) : frames.flatMap((frame) => frame.values);
  const known = heights.filter((value) => Number.isFinite(value));
  if (thresholdStyle(config) === "dashed") known.push(...nearThresholds(config, known));
  return valueAxis(Math.min(...known), Math.max(...known), config);
}

/** What stacked series reach together; a stack stands on zero. */
function totals(frames) {
  return [0, ...frames[0].values.map((_, at) => frames.reduce((sum, frame) => sum + (frame.values[at] ?? 0), 0))];
}

/** Thresholds worth making room for: a line far above the data would flatten it. */
function nearThresholds(config, known) {
  const high = Math.max(...known, 0);
  return thresholdsOf(config)
    .map((step) => step.value)
    .filter((value) => Number.isFinite(value) && value <= 2 * high);
}

function thresholdStyle(config) {
  const mode = config.custom.thresholdsStyle?.mode ?? "off";
  if (mode !== "off" && mode !== "dashed") throw new Error(`this page does not know thresholds drawn as ${mode}`);
  return mode;
}

function thresholdShapes(config) {
  if (thresholdStyle(config) === "off") return [];
  return thresholdsOf(config)
    .filter((step) => Number.isFinite(step.value))
    .map((step) => ({
      type: "line",
      xref: "paper",
      x0: 0,
      x1: 1,
      y0: step.value,
      y1: step.value,
      line: { color: colour(step.color), width: 1.2, dash: "dash" },
    }));
}

/** A line where an event begins, and a tint for as long as it lasts. */
export function eventShapes(events, window) {
  return events.flatMap((event) => [
    {
      type: "line",
      yref: "paper",
      y0: 0,
      y1: 1,
      x0: event.from,
      x1: event.from,
      line: { color: event.colour, width: 1.2, dash: "dash" },
    },
    ...(event.to > event.from
      ? [
          {
            type: "rect",
            yref: "paper",
            y0: 0,
            y1: 1,
            x0: event.from,
            x1: Math.min(event.to, window.end * 1000),
            fillcolor: faint(event.colour, 0.05),
            line: { width: 0 },
            layer: "below",
          },
        ]
      : []),
  ]);
}

/** Names with their colours, or a table of them with what their values come to. */
export function drawLegend(legend, panel, frames) {
  const { displayMode, calcs } = panel.options.legend;
  legend.className = displayMode === "table" ? "legend table scroll" : "legend";
  const keys = frames.map((frame, order) => ({ frame, style: `--colour: ${seriesColour(frame.config, order)}` }));
  if (displayMode !== "table") {
    legend.replaceChildren(...keys.map(({ frame, style }) => element("span", { class: "key", style }, frame.name)));
    return;
  }
  const head = ["Name", ...calcs.map((calc) => CALC_NAMES[calc] ?? calc)];
  const rows = keys.map(({ frame, style }) =>
    element(
      "tr",
      {},
      element("td", { class: "key", style }, frame.name),
      ...calcs.map((calc) => element("td", { class: "number" }, textOf(frame.config, reduce(frame.values, calc)))),
    ),
  );
  legend.replaceChildren(
    element(
      "table",
      {},
      element("tr", {}, ...head.map((name, at) => element("th", { class: at ? "number" : null }, name))),
      ...rows,
    ),
  );
}
