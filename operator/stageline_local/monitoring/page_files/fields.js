// What a panel says of its fields: unit, name, colour, thresholds, for one frame after its overrides. Pure.

import { format } from "./units.js";
import { PALETTE, between, colour, scaleOf } from "./colours.js";

/** Panels that colour series apart unless told otherwise; all others colour by value. */
const BY_SERIES = new Set(["timeseries", "barchart"]);

/** `series name` of a frame: its legend with labels filled in, or the labels themselves. */
export function nameOf(target, labels) {
  const legend = target.legendFormat;
  if (legend && legend !== "__auto") {
    return legend.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, label) => labels[label] ?? "");
  }
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
  switch (id) {
    case "byName":
      return options === name;
    case "byRegexp":
      return pattern(options).test(name);
    case "byFrameRefID":
      return options === refId;
    case "byNames":
      return (options.names ?? []).includes(name);
    case "byType":
      return options === "number";
    default:
      return false;
  }
}

export function pattern(text) {
  const found = /^\/(.*)\/(\w*)$/.exec(text);
  return found ? new RegExp(found[1], found[2]) : new RegExp(`^${text}$`);
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
  return format(value, config.unit, config.decimals ?? undefined);
}

export function mappingOf(config, value) {
  for (const { type, options } of config.mappings ?? []) {
    if (type === "value" && String(value) in options) return options[String(value)];
    if (
      type === "range" &&
      value !== null &&
      value >= (options.from ?? -Infinity) &&
      value <= (options.to ?? Infinity)
    ) {
      return options.result;
    }
    if (type === "special" && isSpecial(options.match, value)) return options.result;
    if (type === "regex" && pattern(options.pattern).test(String(value))) return options.result;
  }
  return null;
}

function isSpecial(match, value) {
  const empty = value === null || value === undefined;
  return { null: empty, nan: Number.isNaN(value), "null+nan": empty || Number.isNaN(value), empty: value === "" }[
    match
  ];
}

/** The colour of a value, where a panel colours by value; `order` is the series' place, for palettes. */
export function colourOf(config, value, order) {
  const mapped = mappingOf(config, value);
  if (mapped?.color) return colour(mapped.color);
  const mode = config.color?.mode ?? "palette-classic";
  if (mode === "fixed") return colour(config.color.fixedColor ?? "blue");
  if (mode === "thresholds") return colour(stepOf(config, value)?.color ?? "green");
  if (mode.startsWith("continuous-")) return between(scaleOf(mode.slice(11)), share(config, value));
  return PALETTE[order % PALETTE.length];
}

export function seriesColour(config, order) {
  const mode = config.color?.mode ?? "palette-classic";
  return mode === "fixed" ? colour(config.color.fixedColor ?? "blue") : PALETTE[order % PALETTE.length];
}

/** Thresholds as absolute values, lowest first; the first begins at minus infinity. */
export function thresholdsOf(config) {
  const steps = config.thresholds?.steps ?? [];
  const percent = config.thresholds?.mode === "percentage";
  const [low, high] = [config.min ?? 0, config.max ?? 100];
  return steps.map((step) => ({
    color: step.color,
    value:
      step.value === null || step.value === undefined
        ? -Infinity
        : percent
          ? low + (step.value / 100) * (high - low)
          : step.value,
  }));
}

export function stepOf(config, value) {
  return (
    thresholdsOf(config)
      .filter((step) => value !== null && value >= step.value)
      .at(-1) ?? null
  );
}

function share(config, value) {
  const [low, high] = [config.min ?? 0, config.max ?? 1];
  return Math.min(1, Math.max(0, ((value ?? low) - low) / (high - low || 1)));
}
