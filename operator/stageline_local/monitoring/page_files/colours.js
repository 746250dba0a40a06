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
};
const SHADES = { "super-light-": 0.45, "light-": 0.25, "dark-": -0.3 };
const SCALES = {
  Oranges: ["#fdeed9", "#e08a1e", "#9c4a06"],
  RdYlBu: ["red", "yellow", "blue"],
};

/** A board's colour name as CSS; throws for one that this page does not know. */
export function colour(name) {
  if (name.startsWith("#")) return name;
  const shadeOf = Object.keys(SHADES).find((prefix) => name.startsWith(prefix)) ?? "";
  const plain = NAMED[name.slice(shadeOf.length)];
  if (!plain) throw new Error(`this page does not know the colour ${name}`);
  return shadeOf ? shade(plain, SHADES[shadeOf]) : plain;
}

/** Anchors of a colour scale as CSS colours; throws for one that this page does not know. */
export function scaleOf(name) {
  if (!(name in SCALES)) throw new Error(`this page does not know the colour scale ${name}`);
  return SCALES[name].map(colour);
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
