// Tables: rows from instant queries, changed as the panel's transformations say.

import { element } from "./elements.js";
import { colourOf, configOf, textOf } from "./fields.js";

/** Draws the rows of `answers` (one `{refId, frames}` per query). */
export function drawTable(body, panel, answers, resolve) {
  const table = tableOf(panel, answers);
  const shown = table.columns.filter((name) => name !== "Time");
  const configs = new Map(shown.map((name) => [name, configOf(panel, name, table.refIds[name])]));
  const sort = panel.options?.sortBy?.[0];
  const rows = sort ? sorted(table.rows, sort.displayName, sort.desc) : table.rows;
  const isNumber = (name) => rows.some((row) => typeof row[name] === "number");
  const head = shown.map((name) =>
    element("th", { class: isNumber(name) ? "number" : null, scope: "col" }, name),
  );
  const lines = rows.map((row) =>
    element("tr", {}, ...shown.map((name) => cell(row, name, configs.get(name), resolve))),
  );
  body.replaceChildren(element("div", { class: "scroll" }, element("table", {}, element("tr", {}, ...head), ...lines)));
}

/** Rows and columns after the panel's transformations. */
export function tableOf(panel, answers) {
  let table = gathered(answers);
  for (const { id, options = {} } of panel.transformations ?? []) {
    const change = CHANGES[id];
    if (!change) throw new Error(`this page does not know the transformation ${id}`);
    table = change(table, options);
  }
  return table;
}

function cell(row, name, config, resolve) {
  const value = row[name];
  const text = typeof value === "number" || config.mappings?.length ? textOf(config, value ?? null) : (value ?? "");
  const coloured = typeof value === "number" && config.custom.cellOptions?.type === "color-text";
  const style = coloured ? `color: ${colourOf(config, value)}; font-weight: 600` : null;
  const link = config.links?.[0];
  const content = link ? element("a", { href: resolve(link.url, row) }, text) : text;
  return element("td", { class: typeof value === "number" ? "number" : null, style }, content);
}

/** All answers under each other: a column per label and one per query. */
function gathered(answers) {
  const refIds = {};
  const rows = answers.flatMap(({ refId, frames }) => {
    const name = answers.length === 1 ? "Value" : `Value #${refId}`;
    refIds[name] = refId;
    return frames.map((frame) => ({ Time: frame.times.at(-1), ...frame.labels, [name]: frame.values.at(-1) }));
  });
  return { columns: columnsOf(rows), rows, refIds };
}

function columnsOf(rows) {
  const labels = [...new Set(rows.flatMap(Object.keys))];
  const isValue = (name) => name.startsWith("Value");
  return [...labels.filter((name) => !isValue(name)), ...labels.filter(isValue)];
}

function joined(table, keyOf) {
  const found = new Map();
  for (const row of table.rows) {
    const key = keyOf(row);
    found.set(key, { ...(found.get(key) ?? {}), ...row });
  }
  return { ...table, rows: [...found.values()], columns: columnsOf([...found.values()]) };
}

const CHANGES = {
  merge: (table) => {
    const shared = table.columns.filter((name) => !name.startsWith("Value") && name !== "Time");
    return joined(table, (row) => JSON.stringify(shared.map((name) => row[name] ?? null)));
  },
  organize: (table, { excludeByName = {}, renameByName = {}, indexByName = {} }) => {
    const order = (name) => indexByName[name] ?? Number.MAX_SAFE_INTEGER;
    const kept = table.columns.filter((name) => !excludeByName[name]).sort((a, b) => order(a) - order(b));
    return renamed({ ...table, columns: kept }, (name) => renameByName[name] || name);
  },
  sortBy: (table, { sort = [] }) => ({
    ...table,
    rows: sort.length ? sorted(table.rows, sort[0].field, sort[0].desc) : table.rows,
  }),
};

function renamed(table, nameFor) {
  const rows = table.rows.map((row) =>
    Object.fromEntries(Object.entries(row).map(([name, value]) => [nameFor(name), value])),
  );
  const refIds = Object.fromEntries(Object.entries(table.refIds).map(([name, refId]) => [nameFor(name), refId]));
  return { ...table, rows, refIds, columns: table.columns.map(nameFor) };
}

function sorted(rows, name, descending) {
  const compare = (a, b) =>
    typeof a === "number" && typeof b === "number"
      ? a - b
      : String(a ?? "").localeCompare(String(b ?? ""), undefined, { numeric: true });
  return [...rows].sort((a, b) => (descending ? -1 : 1) * compare(a[name], b[name]));
}
