// Panels over time, drawn with plotly: lines, bars and stacks, with thresholds and annotations. Times are UTC.

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
  const { plot, legend } = halves(body, panel);
  const config = frames[0].config;
  const stacks = frames.map((frame) => stackOf(frame.config));
  const layout = {
    ...timeLayout(window),
    yaxis: { ...axisLook(), ...axisOf(frames, stacks), title: { text: config.custom.axisLabel ?? "", standoff: 4 } },
    barmode: stacks.some(Boolean) ? "stack" : "group",
    bargap: 0.1,
    hovermode: panel.options?.tooltip?.mode === "single" ? "closest" : "x unified",
    shapes: [...thresholdShapes(config), ...eventShapes(events, window)],
  };
  // The legend first: it takes its room from the plot.
  drawLegend(legend, panel, frames);
  Plotly.react(
    plot,
    frames.map((frame, order) => traceOf(frame, order, stacks[order])),
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
export function halves(body, panel) {
  if (!body.querySelector(".plot")) {
    body.replaceChildren(plotBox(), element("div", { class: "legend" }));
    body.classList.toggle("beside", panel.options?.legend?.placement === "right");
  }
  return { plot: body.querySelector(".plot"), legend: body.querySelector(".legend") };
}

function stackOf(config) {
  const { mode = "none", group = "A" } = config.custom.stacking ?? {};
  return mode === "none" ? null : { group, percent: mode === "percent" };
}

function traceOf(frame, order, stack) {
  const { config, times, values, name } = frame;
  const custom = config.custom;
  const ink = seriesColour(config, order);
  const opacity = (custom.fillOpacity ?? 0) / 100;
  const text = values.map((value) => textOf(config, value));
  const common = { x: times, y: values, name, text, hovertemplate: "%{text}" };
  if (custom.drawStyle === "bars") {
    return { ...common, type: "bar", textposition: "none", marker: { color: faint(ink, Math.max(opacity, 0.75)) } };
  }
  const dots = custom.drawStyle === "points" || values.filter((value) => value !== null).length === 1;
  const line = { color: ink, width: custom.lineWidth ?? 1.5, dash: dashOf(custom), shape: shapeOf(custom) };
  const shared = {
    ...common,
    type: "scatter",
    mode: dots ? "markers" : "lines",
    line,
    marker: { color: ink, size: 5 },
  };
  if (stack) {
    const groupnorm = stack.percent ? "fraction" : "";
    // Without lines: plotly would draw those of series that are gone on top of the others.
    return {
      ...shared,
      line: { ...line, width: 0 },
      stackgroup: stack.group,
      groupnorm,
      fillcolor: faint(ink, Math.max(opacity, 0.55)),
    };
  }
  // plotly would fill across a gap, as if something had been there.
  const filled = opacity && !hasGap(values) ? { fill: "tozeroy", fillcolor: faint(ink, opacity) } : {};
  return { ...shared, ...filled, connectgaps: Boolean(custom.spanNulls) };
}

function hasGap(values) {
  const first = values.findIndex((value) => value !== null);
  const last = values.findLastIndex((value) => value !== null);
  return values.slice(first, last).includes(null);
}

function dashOf(custom) {
  return { dash: "dash", dot: "dot" }[custom.lineStyle?.fill] ?? "solid";
}

function shapeOf(custom) {
  return { stepAfter: "hv", stepBefore: "vh" }[custom.lineInterpolation] ?? "linear";
}

function axisOf(frames, stacks) {
  const config = frames[0].config;
  if (stacks.some((stack) => stack?.percent)) {
    const ticks = [0, 0.25, 0.5, 0.75, 1];
    return { range: [0, 1], tickvals: ticks, ticktext: ticks.map((tick) => `${tick * 100}%`) };
  }
  const heights = frames.flatMap((frame, order) => (stacks[order] ? [] : frame.values));
  heights.push(...totals(frames.filter((_, order) => stacks[order])));
  const known = heights.filter((value) => Number.isFinite(value));
  if (config.custom.thresholdsStyle?.mode?.match(/line|dashed/)) known.push(...nearThresholds(config, known));
  return valueAxis(Math.min(...known), Math.max(...known), config);
}

/** What stacked series reach together; a stack stands on zero. */
function totals(frames) {
  if (!frames.length) return [];
  return [0, ...frames[0].values.map((_, at) => frames.reduce((sum, frame) => sum + (frame.values[at] ?? 0), 0))];
}

/** Thresholds worth making room for: a line far above the data would flatten it. */
function nearThresholds(config, known) {
  const high = Math.max(...known, 0);
  return thresholdsOf(config)
    .map((step) => step.value)
    .filter((value) => Number.isFinite(value) && value <= 2 * high);
}

function thresholdShapes(config) {
  const mode = config.custom.thresholdsStyle?.mode ?? "off";
  if (mode === "off") return [];
  const steps = thresholdsOf(config).filter((step) => Number.isFinite(step.value));
  const lines = steps.map((step) => ({
    type: "line",
    xref: "paper",
    x0: 0,
    x1: 1,
    y0: step.value,
    y1: step.value,
    line: { color: colour(step.color), width: 1.2, dash: mode.startsWith("dashed") ? "dash" : "solid" },
  }));
  if (!mode.includes("area")) return lines;
  const areas = steps.map((step, at) => ({
    type: "rect",
    xref: "paper",
    x0: 0,
    x1: 1,
    y0: step.value,
    y1: steps[at + 1]?.value ?? 1e15,
    fillcolor: faint(colour(step.color), 0.1),
    line: { width: 0 },
    layer: "below",
  }));
  return mode === "area" ? areas : [...areas, ...lines];
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
  const { displayMode = "list", showLegend = true, placement, calcs = [] } = panel.options?.legend ?? {};
  legend.hidden = !showLegend || displayMode === "hidden";
  if (legend.hidden) return;
  legend.className = `legend ${placement === "right" ? "right" : ""} ${displayMode === "table" ? "table scroll" : ""}`;
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
