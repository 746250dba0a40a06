// Where panels go: Grafana's 24 columns, rows that open and close, panels and rows repeated by a variable.

import { element } from "./elements.js";
import { Panel } from "./panels.js";

/** Sections of `board` in order: `{title, open, panels}`; what comes before the first row has no title. */
export function sectionsOf(board, variables) {
  const sections = [{ title: null, open: true, panels: [], scoped: {} }];
  const ordered = [...(board.panels ?? [])].sort((a, b) => a.gridPos.y - b.gridPos.y || a.gridPos.x - b.gridPos.x);
  for (const panel of ordered) {
    if (panel.type !== "row") {
      sections.at(-1).panels.push(panel);
      continue;
    }
    const models = panel.panels ?? [];
    sections.push({
      title: panel.title ?? "",
      open: !panel.collapsed,
      panels: [...models],
      scoped: {},
      repeat: panel.repeat,
    });
  }
  return sections.filter((section) => section.panels.length).flatMap((section) => repeatedSection(section, variables));
}

function repeatedSection(section, variables) {
  if (!section.repeat) return [section];
  return variables.each(section.repeat).map((value) => ({ ...section, scoped: { [section.repeat]: value } }));
}

/** One section as HTML, and its panels. */
export function buildSection(section, variables, refresh) {
  const top = Math.min(...section.panels.map((panel) => panel.gridPos.y));
  const panels = section.panels.flatMap((model) => repeated(model, variables, section.scoped, top));
  const grid = element("div", { class: "grid", hidden: section.open ? null : "" }, ...panels.map((panel) => panel.box));
  const built = { panels, isOpen: () => !grid.hidden };
  const heading =
    section.title === null
      ? []
      : [element("h2", {}, toggle(variables.fill(section.title, section.scoped, true), grid, refresh))];
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

function repeated(model, variables, scoped, top) {
  const { x, y, w, h } = model.gridPos;
  if (!model.repeat) return [new Panel(model, variables, scoped, place(x, y - top, w, h))];
  const values = variables.each(model.repeat);
  const across = Math.min(values.length, model.maxPerRow ?? 4) || 1;
  const width = model.repeatDirection === "v" ? w : Math.floor(24 / across);
  return values.map((value, at) => {
    const [column, row] = model.repeatDirection === "v" ? [x, at] : [(at % across) * width, Math.floor(at / across)];
    return new Panel(
      model,
      variables,
      { ...scoped, [model.repeat]: value },
      place(column, y - top + row * h, width, h),
    );
  });
}

function place(x, y, w, h) {
  return `grid-column: ${x + 1} / span ${w}; grid-row: ${y + 1} / span ${h}`;
}
