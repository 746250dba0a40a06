// A board's variables: what can be chosen, what is chosen, and what becomes of `$name` in a text.

import { ask } from "./prometheus.js";

const ALL = "$__all";
const REFERENCE = /\$\{(\w+)(?::(\w+))?\}|\$(\w+)|\[\[(\w+)\]\]/g;

export class Variables {
  /** `chosen` maps names to lists of values, as the address bar has them. */
  constructor(definitions, chosen) {
    this.list = definitions.map((each) => ({ ...each, options: [], values: chosen[each.name] ?? null }));
  }

  /** Fill in what can be chosen, in order, since a later one may ask with an earlier one's value. */
  async load(window) {
    for (const variable of this.list) {
      variable.options = await this.optionsOf(variable, window);
      const known = new Set([ALL, ...variable.options]);
      const kept = (variable.values ?? initial(variable)).filter((value) => known.has(value));
      variable.values = kept.length ? kept : fallback(variable);
    }
  }

  async optionsOf(variable, window) {
    switch (variable.type) {
      case "query":
        return ofPattern(variable, await this.query(variable, window));
      case "custom":
        return (variable.query ?? "")
          .split(",")
          .map((part) => part.trim().split(" : ").at(-1))
          .filter(Boolean);
      case "interval":
        return (variable.query ?? "")
          .split(",")
          .map((part) => part.trim())
          .filter(Boolean);
      case "constant":
      case "textbox":
        return [String(variable.query ?? "")];
      case "datasource":
        return ["prometheus"];
      default:
        throw new Error(`this page does not know variables of type ${variable.type}`);
    }
  }

  async query(variable, window) {
    const raw =
      typeof variable.query === "string" ? variable.query : (variable.query?.query ?? variable.definition ?? "");
    const text = this.fill(raw, window.builtins);
    const times = { start: window.start, end: window.end };
    const values = /^label_values\(\s*(?:([\s\S]+),\s*)?(\w+)\s*\)$/.exec(text);
    if (values) {
      const match = values[1] ? { "match[]": values[1] } : {};
      return ask(`label/${values[2]}/values?${new URLSearchParams({ ...times, ...match })}`);
    }
    const result = /^query_result\(([\s\S]+)\)$/.exec(text);
    if (result) {
      const data = await ask("query", { query: result[1], time: window.end });
      return data.result.map(({ metric, value }) => `${seriesName(metric)} ${value[1]} ${value[0] * 1000}`);
    }
    throw new Error(`this page does not know the variable query ${text}`);
  }

  /** The variables a person chooses from. */
  shown() {
    return this.list.filter((each) => each.hide !== 2 && !["datasource", "constant"].includes(each.type));
  }

  /** Chosen values, with "All" spelt out, to repeat panels by. */
  each(name) {
    const variable = this.list.find((each) => each.name === name);
    if (!variable) return [];
    return variable.values.includes(ALL) ? variable.options : variable.values;
  }

  /** `text` with its references replaced, for PromQL (`regex` where several can be chosen) or to be read. */
  fill(text, more = {}, toBeRead = false) {
    return text.replace(REFERENCE, (whole, braced, shape, bare, bracketed) => {
      const name = braced ?? bare ?? bracketed;
      if (name in more) return more[name];
      const variable = this.list.find((each) => each.name === name);
      if (!variable || variable.values === null) return whole;
      return toBeRead ? readable(variable) : shaped(variable, shape);
    });
  }
}

function initial(variable) {
  const value = variable.current?.value;
  const values = Array.isArray(value) ? value : value === undefined || value === "" ? [] : [String(value)];
  return variable.includeAll && !values.length ? [ALL] : values;
}

function fallback(variable) {
  if (variable.includeAll) return [ALL];
  return variable.options.slice(0, 1);
}

function ofPattern(variable, values) {
  const found = /^\/(.*)\/(\w*)$/.exec(variable.regex ?? "");
  const kept = found ? values.map((value) => new RegExp(found[1], found[2]).exec(value)) : null;
  const unique = new Set(kept ? kept.filter(Boolean).map((match) => match[1] ?? match[0]) : values);
  return [...unique].sort((a, b) => a.localeCompare(b, undefined, { numeric: true }));
}

function seriesName(metric) {
  const { __name__: name = "", ...labels } = metric;
  return `${name}{${Object.entries(labels)
    .map(([key, value]) => `${key}="${value}"`)
    .join(",")}}`;
}

function readable(variable) {
  return variable.values.includes(ALL) ? "All" : variable.values.join(" + ");
}

function shaped(variable, shape) {
  const all = variable.values.includes(ALL);
  if (all && variable.allValue) return variable.allValue;
  const values = all ? variable.options : variable.values;
  switch (shape) {
    case "raw":
    case "csv":
      return values.join(",");
    case "pipe":
      return values.join("|");
    case "queryparam":
      return values.map((value) => `var-${variable.name}=${encodeURIComponent(value)}`).join("&");
    case "percentencode":
      return encodeURIComponent(values.join(","));
  }
  if (!variable.multi && !variable.includeAll && shape !== "regex") return values.join("").replaceAll("\\", "\\\\");
  // A regular expression inside a PromQL string: what escapes there is escaped twice.
  const escaped = values.map((value) => value.replace(/[.*+?^${}()|[\]\\]/g, "\\\\$&"));
  return escaped.length === 1 ? escaped[0] : `(${escaped.join("|")})`;
}
