// What a panel says of its fields: unit, name, colour, thresholds, for one frame after its overrides. Pure.

import { format } from "./units.js";
import { PALETTE, colour } from "./colours.js";

/** Panels that colour series apart unless told otherwise; all others colour by value. */
const BY_SERIES = new Set(["timeseries", "barchart"]);

/** `series name` of a frame: its legend with labels filled in, or the labels themselves. */
export function nameOf(target, labels) {
  const legend = target.legendFormat;
  if (legend) return legend.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, label) => labels[label] ?? "");
  const { __name__: metric = "", ...rest } = labels;
  const own = Object.entries(rest).map(([key, value]) => `${key}="${value}"`);
  return own.length ? `${metric}{${own.join(", ")}}` : metric || "Value";
}

/** The field configuration that holds for a frame called `name` from query `refId`. */
export function configOf(panel, name, refId = "") {
  const config = structuredClone(panel.fieldConfig?.defaults ?? {});
  config.color ??= { mode: BY_SERIES.has(panel.type) ? "palette-classic" : "thresholds" };
  config.custom ??= {};
  for (const { matcher, properties } of panel.fieldConfig?.overrides ?? []) {
    if (!matches(matcher, name, refId)) continue;
    for (const { id, value } of properties) assign(config, id, value);
  }
  return config;
}

function matches({ id, options }, name, refId) {
  if (id === "byName") return options === name;
  if (id === "byFrameRefID") return options === refId;
  throw new Error(`this page does not know overrides ${id}`);
}

function assign(config, path, value) {
  const parts = path.split(".");
  let at = config;
  for (const part of parts.slice(0, -1)) at = at[part] ??= {};
  at[parts.at(-1)] = value;
}

/** The text of a value: what it is mapped to, or the number with its unit. */
export function textOf(config, value) {
  const mapped = mappingOf(config, value);
  if (mapped?.text) return mapped.text;
  if (value === null || value === undefined) return config.noValue ?? "no data";
  return format(value, config.unit, config.decimals);
}

function mappingOf(config, value) {
  for (const { type, options } of config.mappings ?? []) {
    if (type !== "value") throw new Error(`this page does not know mappings of a ${type}`);
    if (String(value) in options) return options[String(value)];
  }
  return null;
}

/** The colour of a value, where a panel colours by value. */
export function colourOf(config, value) {
  const mapped = mappingOf(config, value);
  if (mapped?.color) return colour(mapped.color);
  if (config.color.mode === "fixed") return colour(config.color.fixedColor);
  return colour(stepOf(config, value)?.color ?? "green");
}

/** The colour of a series, by its place where the panel fixes none. */
export function seriesColour(config, order) {
  return config.color.mode === "fixed" ? colour(config.color.fixedColor) : PALETTE[order % PALETTE.length];
}

/** Thresholds as absolute values, lowest first; the first begins at minus infinity. */
export function thresholdsOf(config) {
  const { mode = "absolute", steps = [] } = config.thresholds ?? {};
  if (mode !== "absolute") throw new Error(`this page does not know thresholds in ${mode}`);
  return steps.map((step) => ({ color: step.color, value: step.value ?? -Infinity }));
}

function stepOf(config, value) {
  return thresholdsOf(config).findLast((step) => value !== null && value >= step.value) ?? null;
}
