// Panels that show one value each series rather than its course.

import { element } from "./elements.js";
import { colourOf, textOf } from "./fields.js";
import { reduce } from "./reducers.js";

/** One large value per series, in the colour of its threshold. */
export function drawStat(body, panel, frames) {
  const { reduceOptions, textMode } = panel.options;
  const named = textMode === "value_and_name" || (textMode === "auto" && frames.length > 1);
  const size = Math.max(0.95, Math.min(1.9, 1.1 + (panel.gridPos.h - 3) * 0.25 + (frames.length > 3 ? -0.3 : 0)));
  const boxes = frames.map(({ config, name, values }) => {
    const value = reduce(values, reduceOptions.calcs[0]);
    return element(
      "div",
      { class: "stat", style: `color: ${colourOf(config, value)}`, title: name },
      ...(named ? [element("span", { class: "name" }, name)] : []),
      element("span", { class: "value", style: `font-size: ${size}rem` }, textOf(config, value)),
    );
  });
  body.replaceChildren(element("div", { class: "stats" }, ...boxes));
}
