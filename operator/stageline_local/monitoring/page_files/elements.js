// Small pieces of HTML and SVG.

/** `<name class=… …>` with children, which may be texts. */
export function element(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/** The same in SVG. */
export function drawing(name, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function fill(made, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

/** The value of a CSS variable, for what can't use one itself. */
export function cssValue(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** `HH:MM:SS` in UTC, of milliseconds. */
export function clock(milliseconds) {
  return new Date(milliseconds).toISOString().slice(11, 19);
}
