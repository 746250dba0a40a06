// Panels that show values rather than courses: stat, bar gauge, text.

import { drawing, element } from "./elements.js";
import { faint, inkOn } from "./colours.js";
import { colourOf, textOf } from "./fields.js";
import { reduce } from "./reducers.js";

/** One large value per series, over its course where the panel asks for that. */
export function drawStat(body, panel, frames) {
  const { reduceOptions = {}, colorMode = "value", graphMode = "area", textMode = "auto" } = panel.options ?? {};
  const calculation = reduceOptions.calcs?.[0] ?? "lastNotNull";
  const named = textMode === "value_and_name" || textMode === "name" || (textMode === "auto" && frames.length > 1);
  const size = Math.max(0.95, Math.min(1.9, 1.1 + (panel.gridPos.h - 3) * 0.25 + (frames.length > 3 ? -0.3 : 0)));
  const boxes = frames.map((frame, order) => {
    const value = reduce(frame.values, calculation);
    const ink = colourOf(frame.config, value, order);
    const filled = colorMode.startsWith("background");
    const style = filled ? `background: ${ink}; color: ${inkOn(ink)}` : colorMode === "value" ? `color: ${ink}` : null;
    const name = frame.config.displayName ?? frame.name;
    return element(
      "div",
      { class: "stat", style, title: name },
      ...(graphMode === "area" && frame.values.length > 1 ? [course(frame.values, filled ? inkOn(ink) : ink)] : []),
      ...(named ? [element("span", { class: "name" }, name)] : []),
      ...(textMode === "name"
        ? []
        : [element("span", { class: "value", style: `font-size: ${size}rem` }, textOf(frame.config, value))]),
    );
  });
  body.replaceChildren(element("div", { class: "stats" }, ...boxes));
}

/** A line without axes. */
function course(values, ink) {
  const known = values.map((value, at) => [at, value]).filter(([, value]) => Number.isFinite(value));
  const top = Math.max(...known.map(([, value]) => value), 0) || 1;
  const low = Math.min(...known.map(([, value]) => value), 0);
  const points = known.map(
    ([at, value]) => `${(at / (values.length - 1)) * 100},${38 - ((value - low) / (top - low || 1)) * 34}`,
  );
  return drawing(
    "svg",
    { viewBox: "0 0 100 40", preserveAspectRatio: "none", "aria-hidden": "true" },
    drawing("polyline", {
      points: points.join(" "),
      fill: "none",
      stroke: ink,
      "stroke-width": 1.5,
      "vector-effect": "non-scaling-stroke",
    }),
  );
}

/** One bar per series, longest at the panel's `max` or at the largest value. */
export function drawBarGauge(body, panel, frames) {
  const calculation = panel.options?.reduceOptions?.calcs?.[0] ?? "lastNotNull";
  const values = frames.map((frame) => reduce(frame.values, calculation));
  const largest = Math.max(...values.filter((value) => value !== null), 0) || 1;
  const cells = frames.flatMap((frame, order) => {
    const { config } = frame;
    const [low, high] = [config.min ?? 0, config.max ?? largest];
    const share = Math.min(1, Math.max(0, ((values[order] ?? low) - low) / (high - low || 1)));
    const ink = colourOf(config, values[order], order);
    return [
      element("span", {}, config.displayName ?? frame.name),
      element(
        "div",
        { class: "track" },
        element("div", {
          class: "filled",
          style: `width: ${share * 100}%; background: linear-gradient(90deg, ${faint(ink, 0.6)}, ${ink})`,
        }),
      ),
      element("span", { class: "value", style: `color: ${ink}` }, textOf(config, values[order])),
    ];
  });
  body.replaceChildren(element("div", { class: "bars" }, ...cells));
}

/** Paragraphs with **bold**, `code` and [links](…); nothing else of Markdown is needed here. */
export function drawText(body, content) {
  const paragraphs = content
    .trim()
    .split(/\n\s*\n/)
    .map((text) => element("p", {}, ...inline(text.replace(/^#+\s*/, ""))));
  body.replaceChildren(element("div", { class: "text" }, ...paragraphs));
}

function inline(text) {
  const parts = text.split(/(\*\*[^*]+\*\*|`[^`]+`|\[[^\]]+\]\([^)\s]+\))/);
  return parts.map((part) => {
    const link = /^\[([^\]]+)\]\((https?:[^)\s]+|[/#?][^)\s]*)\)$/.exec(part);
    if (link) return element("a", { href: link[2] }, link[1]);
    if (part.startsWith("**")) return element("b", {}, part.slice(2, -2));
    return part.startsWith("`") ? element("code", {}, part.slice(1, -1)) : part;
  });
}
