// Colours: a board's names for them, scales between them, and what can be read on them. Pure.

export const PALETTE = [
  "#3274d9",
  "#e08a1e",
  "#2f9e62",
  "#c4362b",
  "#8456c6",
  "#0f9aa8",
  "#b8487f",
  "#7a8b1f",
  "#5f6b7a",
  "#a05f2c",
  "#5aa9e6",
  "#d46a5c",
];
const NAMED = {
  green: "#3fa65a",
  yellow: "#dba617",
  orange: "#e0752d",
  red: "#d23a35",
  blue: "#3b78d8",
  purple: "#8a56c9",
  gray: "#7a848f",
  grey: "#7a848f",
  white: "#ffffff",
  black: "#111111",
  text: "var(--ink)",
  transparent: "transparent",
};
const SHADES = { "super-light-": 0.45, "light-": 0.25, "semi-dark-": -0.15, "dark-": -0.3 };
const SCALES = {
  GrYlRd: ["green", "yellow", "red"],
  RdYlGn: ["red", "yellow", "green"],
  RdYlBu: ["red", "yellow", "blue"],
  BlYlRd: ["blue", "yellow", "red"],
  YlRd: ["yellow", "red"],
  BlPu: ["blue", "purple"],
  blues: ["#dbe8fb", "#1f5fbf"],
  reds: ["#fbe0de", "#b3261e"],
  oranges: ["#fdeed9", "#e08a1e", "#9c4a06"],
  greens: ["#dff3e4", "#1f7a3a"],
  purples: ["#eee3fa", "#5f2fa0"],
};

/** A board's colour name as CSS. */
export function colour(name) {
  if (name.startsWith("#") || name.startsWith("rgb")) return name;
  for (const [prefix, by] of Object.entries(SHADES)) {
    if (name.startsWith(prefix)) return shade(NAMED[name.slice(prefix.length)] ?? NAMED.gray, by);
  }
  return NAMED[name] ?? name;
}

/** Anchors of a colour scale as CSS colours. */
export function scaleOf(name) {
  return (SCALES[name] ?? SCALES[name?.toLowerCase()] ?? SCALES.blues).map(colour);
}

export function between(anchors, at) {
  const place = at * (anchors.length - 1);
  const first = Math.min(anchors.length - 2, Math.floor(place));
  const [from, to] = [channels(anchors[first]), channels(anchors[first + 1])];
  return `rgb(${from.map((part, n) => Math.round(part + (to[n] - part) * (place - first))).join(",")})`;
}

function shade(hex, by) {
  const parts = channels(hex).map((part) => Math.round(by > 0 ? part + (255 - part) * by : part * (1 + by)));
  return `rgb(${parts.join(",")})`;
}

function channels(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

/** `hex` or `rgb(…)` with an opacity. */
export function faint(css, opacity) {
  const parts = css.startsWith("#") ? channels(css) : (css.match(/\d+/g)?.slice(0, 3) ?? [128, 128, 128]);
  return `rgba(${parts.join(",")},${opacity})`;
}

/** Black or white, whichever is read better on `css`. */
export function inkOn(css) {
  if (!css.startsWith("#") && !css.startsWith("rgb")) return "inherit";
  const [red, green, blue] = (css.startsWith("#") ? channels(css) : css.match(/\d+/g)).map(Number);
  return red * 0.299 + green * 0.587 + blue * 0.114 > 150 ? "#111" : "#fff";
}
