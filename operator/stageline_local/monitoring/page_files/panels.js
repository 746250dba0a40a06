// One panel: its frame on the page, its queries, and which drawing it gets.

import { drawBarChart } from "./barchart.js";
import { drawHeatmap } from "./heatmap.js";
import { drawTimeSeries } from "./charts.js";
import { element } from "./elements.js";
import { configOf, nameOf } from "./fields.js";
import { instantFrames, rangeFrames, windowOf } from "./prometheus.js";
import { drawStat } from "./readouts.js";
import { drawStates } from "./states.js";
import { drawTable } from "./tables.js";

/** These show rows of a table instead of series. */
const TABLES = { table: drawTable, barchart: drawBarChart };
const POINTS_PER_PIXEL = 0.5;
const DRAWINGS = {
  timeseries: drawTimeSeries,
  heatmap: drawHeatmap,
  stat: drawStat,
  "state-timeline": drawStates,
};

/** The range that is looked at, for addresses of other boards. */
function timeRange() {
  const { searchParams } = new URL(location.href);
  return new URLSearchParams(
    ["range", "end"].filter((key) => searchParams.has(key)).map((key) => [key, searchParams.get(key)]),
  ).toString();
}

export class Panel {
  /** `scoped` are values of repeated variables that hold in this panel alone. */
  constructor(model, variables, scoped, place) {
    Object.assign(this, { model, variables, scoped });
    const title = variables.fill(model.title ?? "", scoped, true);
    const hint = model.description
      ? [element("span", { class: "hint", title: model.description, "aria-label": model.description }, "i")]
      : [];
    this.body = element("div", { class: "body" });
    this.box = element(
      "article",
      { class: "panel", style: place, "data-title": title, "data-type": model.type, "data-state": "waiting" },
      element("header", {}, element("h3", { title }, title), ...hint),
      this.body,
    );
  }

  /** Ask and draw; an error is shown in the panel and nowhere else. */
  async refresh(range, scrapeSeconds, events) {
    try {
      this.settle(await this.draw(range, scrapeSeconds, events));
    } catch (error) {
      this.say(error.message);
      this.settle("error");
    }
  }

  async draw({ start, end }, scrapeSeconds, events) {
    const { model } = this;
    const drawing = DRAWINGS[model.type];
    const table = TABLES[model.type];
    if (!drawing && !table) throw new Error(`this page can't draw panels of type ${model.type}`);
    const window = windowOf(start, end, Math.max(this.body.clientWidth, 200) * POINTS_PER_PIXEL, scrapeSeconds);
    const answers = await this.answers(window);
    const frames = answers.flatMap((answer) => answer.frames);
    if (!frames.some((frame) => frame.values.some((value) => value !== null)))
      return this.say(model.fieldConfig?.defaults?.noValue ?? "no data");
    this.clearMessage();
    if (table) table(this.body, model, answers, (url, row) => this.address(url, row));
    else drawing(this.body, model, frames, window, events);
    return "drawn";
  }

  /** What each query says, in the panel's order. */
  async answers(window) {
    return Promise.all(
      this.model.targets.map(async (target) => {
        const builtins = target.instant ? window.instantBuiltins : window.builtins;
        const expression = this.variables.fill(target.expr, { ...builtins, ...this.scoped });
        const found = await (target.instant ? instantFrames : rangeFrames)(expression, window);
        const frames = found.map((frame) => {
          const name = nameOf(
            { ...target, legendFormat: this.variables.fill(target.legendFormat ?? "", this.scoped, true) },
            frame.labels,
          );
          return { ...frame, name, config: configOf(this.model, name, target.refId) };
        });
        return { refId: target.refId, frames };
      }),
    );
  }

  /** A link's address: variables, and of a table's row its fields. Boards of the same set are on this page. */
  address(url, row) {
    const fields = url
      .replace(/\$\{__data\.fields\.(?:"([^"]+)"|\["?([^"\]]+)"?\]|(\w+))\}/g, (_, a, b, c) =>
        encodeURIComponent(row[a ?? b ?? c] ?? ""),
      )
      .replace(/\$\{__url_time_range\}/g, timeRange());
    return this.variables.fill(fields, this.scoped).replace(/^\/d\/([\w-]+)(?:\/[\w-]*)?\??/, "?board=$1&");
  }

  say(text) {
    const plot = this.body.querySelector(".js-plotly-plot");
    if (plot) Plotly.purge(plot);
    this.body.replaceChildren(element("p", { class: "message" }, text));
    return "no data";
  }

  clearMessage() {
    if (this.body.querySelector(".message")) this.body.replaceChildren();
  }

  settle(state) {
    this.box.dataset.state = state;
  }
}
