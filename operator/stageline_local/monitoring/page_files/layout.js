// Where panels go: Grafana's 24 columns, rows that open and close, panels repeated by a variable.

import { element } from "./elements.js";
import { Panel } from "./panels.js";

/** Sections of `board` in order: `{title, open, panels}`; what comes before the first row has no title. */
export function sectionsOf(board) {
  const sections = [{ title: null, open: true, panels: [] }];
  const ordered = [...(board.panels ?? [])].sort((a, b) => a.gridPos.y - b.gridPos.y || a.gridPos.x - b.gridPos.x);
  for (const panel of ordered) {
    if (panel.type !== "row") {
      sections.at(-1).panels.push(panel);
      continue;
    }
    sections.push({ title: panel.title, open: !panel.collapsed, panels: [...(panel.panels ?? [])] });
  }
  return sections.filter((section) => section.panels.length);
}

/** One section as HTML, and its panels. */
export function buildSection(section, variables, refresh) {
  const top = Math.min(...section.panels.map((panel) => panel.gridPos.y));
  const panels = section.panels.flatMap((model) => repeated(model, variables, top));
  const grid = element("div", { class: "grid", hidden: section.open ? null : "" }, ...panels.map((panel) => panel.box));
  const built = { panels, isOpen: () => !grid.hidden };
  const heading =
    section.title === null
      ? []
      : [element("h2", {}, toggle(section.title, grid, refresh))];
  built.box = element("section", { class: "row" }, ...heading, grid);
  return built;
}

function toggle(title, grid, refresh) {
  const button = element("button", { type: "button", "aria-expanded": String(!grid.hidden) });
  const label = () => {
    button.textContent = `${grid.hidden ? "▸" : "▾"} ${title}`;
  };
  button.addEventListener("click", () => {
    grid.hidden = !grid.hidden;
    button.setAttribute("aria-expanded", String(!grid.hidden));
    label();
    refresh();
  });
  label();
  return button;
}

/** From left to right, as many in a line as the panel says. */
function repeated(model, variables, top) {
  const { x, y, w, h } = model.gridPos;
  if (!model.repeat) return [new Panel(model, variables, {}, place(x, y - top, w, h))];
  const values = variables.each(model.repeat);
  const across = Math.min(values.length, model.maxPerRow) || 1;
  const width = Math.floor(24 / across);
  return values.map((value, at) => {
    const [column, row] = [(at % across) * width, Math.floor(at / across)];
    return new Panel(model, variables, { [model.repeat]: value }, place(column, y - top + row * h, width, h));
  });
}

function place(x, y, w, h) {
  return `grid-column: ${x + 1} / span ${w}; grid-row: ${y + 1} / span ${h}`;
}
