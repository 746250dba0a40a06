// State timelines: one row per series, a box for as long as a value stays the same.

import { clock, drawing, element } from "./elements.js";
import { inkOn } from "./colours.js";
import { colourOf, textOf } from "./fields.js";

/** Draws `frames` as rows in SVG, in pixels of `body`. */
export function drawStates(body, panel, frames, window) {
  const width = Math.max(body.clientWidth - 14, 120);
  const height = Math.max(body.clientHeight - 6, 60);
  const left = Math.min(width * 0.3, 12 + 6.2 * Math.max(...frames.map((frame) => frame.name.length)));
  const [start, end] = [window.start * 1000, window.end * 1000];
  const place = (time) => left + ((Math.min(time, end) - start) / (end - start)) * (width - left);
  const rowHeight = Math.min(44, (height - 18) / frames.length);
  const rows = frames.flatMap((frame, row) => [
    drawing("text", { x: 0, y: row * rowHeight + rowHeight / 2 + 4 }, frame.name),
    ...spans(frame, window.step * 1000).map((span) => box(frame, span, place, row * rowHeight, rowHeight)),
  ]);
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((share) => {
    const anchor = share === 0 ? "start" : share === 1 ? "end" : "middle";
    const x = left + share * (width - left);
    return drawing(
      "text",
      { x, y: frames.length * rowHeight + 14, "text-anchor": anchor },
      clock(start + share * (end - start)),
    );
  });
  const picture = drawing(
    "svg",
    { class: "states", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "xMinYMin meet" },
    ...rows,
    ...ticks,
  );
  body.replaceChildren(picture, element("span", { hidden: "" }));
}

/** Runs of equal values; a sample holds until the next one. */
function spans({ times, values }, stepMilliseconds) {
  const found = [];
  times.forEach((time, at) => {
    const value = values[at];
    if (value === null) return;
    const last = found.at(-1);
    if (last && last.value === value && last.to >= time) last.to = time + stepMilliseconds;
    else found.push({ value, from: time, to: time + stepMilliseconds });
  });
  return found;
}

function box({ config, name }, { value, from, to }, place, top, height) {
  const [x, text] = [place(from), textOf(config, value)];
  const width = Math.max(1, place(to) - x);
  const fill = colourOf(config, value);
  const label =
    width > 7 * text.length
      ? [drawing("text", { class: "within", x: x + 5, y: top + height / 2 + 4, style: `fill: ${inkOn(fill)}` }, text)]
      : [];
  return drawing(
    "g",
    {},
    drawing("title", {}, `${name}: ${text}, from ${clock(from)} to ${clock(to)} UTC`),
    drawing("rect", { x, y: top + 3, width, height: height - 6, fill, rx: 2 }),
    ...label,
  );
}
