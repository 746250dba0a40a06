// A board's variables: what can be chosen, what is chosen, and what becomes of `$name` in a text.

import { ask } from "./prometheus.js";

const ALL = "$__all";
const LABEL_VALUES = /^label_values\(([\s\S]+), (\w+)\)$/;
const REFERENCE = /\$\{(\w+)\}|\$(\w+)/g;

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

  async optionsOf({ type, query }, window) {
    if (type === "datasource") return ["prometheus"];
    const found = type === "query" ? LABEL_VALUES.exec(this.fill(query.query, window.builtins)) : null;
    if (!found) throw new Error(`this page does not know variables of type ${type}: ${JSON.stringify(query)}`);
    const parameters = { start: window.start, end: window.end, "match[]": found[1] };
    const values = await ask(`label/${found[2]}/values?${new URLSearchParams(parameters)}`);
    return values.sort((a, b) => a.localeCompare(b, undefined, { numeric: true }));
  }

  /** The variables a person chooses from. */
  shown() {
    return this.list.filter((each) => each.hide !== 2 && each.type !== "datasource");
  }

  /** Chosen values, with "All" spelt out, to repeat panels by. */
  each(name) {
    const variable = this.list.find((each) => each.name === name);
    if (!variable) return [];
    return variable.values.includes(ALL) ? variable.options : variable.values;
  }

  /** `text` with its references replaced, for PromQL (`regex` where several can be chosen) or to be read. */
  fill(text, more = {}, toBeRead = false) {
    return text.replace(REFERENCE, (whole, braced, bare) => {
      const name = braced ?? bare;
      if (name in more) return more[name];
      const variable = this.list.find((each) => each.name === name);
      if (!variable || variable.values === null) return whole;
      return toBeRead ? readable(variable) : inPromql(variable);
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

function readable(variable) {
  return variable.values.includes(ALL) ? "All" : variable.values.join(" + ");
}

function inPromql(variable) {
  const all = variable.values.includes(ALL);
  if (all && variable.allValue) return variable.allValue;
  const values = all ? variable.options : variable.values;
  if (!variable.multi && !variable.includeAll) return values.join("").replaceAll("\\", "\\\\");
  // A regular expression inside a PromQL string: what escapes there is escaped twice.
  const escaped = values.map((value) => value.replace(/[.*+?^${}()|[\]\\]/g, "\\\\$&"));
  return escaped.length === 1 ? escaped[0] : `(${escaped.join("|")})`;
}
