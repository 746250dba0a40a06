// Alerts that fire or are about to, worst first, each with a way to its runbook; and events drawn on the boards.

import { colour } from "./colours.js";
import { nameOf } from "./fields.js";
import { ask, rangeFrames, windowOf } from "./prometheus.js";
import { clock, element } from "./elements.js";

const RANK = { critical: 0, warning: 1, info: 2 };
const MOST_EVENTS = 6;

/** Draws the alerts of this moment: a line for each name that fires, worst first, and one for what is pending. */
export async function drawAlerts(box) {
  const { alerts } = await ask("alerts");
  const rank = (alert) => RANK[alert.labels.severity] ?? 3;
  alerts.sort((a, b) => rank(a) - rank(b) || a.labels.alertname.localeCompare(b.labels.alertname));
  const open = new Set([...box.querySelectorAll("details[open]")].map((each) => each.dataset.alert));
  const firing = byName(alerts.filter((alert) => alert.state === "firing"));
  const pending = alerts.filter((alert) => alert.state !== "firing");
  box.replaceChildren(
    ...firing.map((same) => firingLine(same, open)),
    ...(pending.length ? [pendingLine(pending, open)] : []),
  );
}

function byName(alerts) {
  const found = new Map();
  for (const alert of alerts) found.set(alert.labels.alertname, [...(found.get(alert.labels.alertname) ?? []), alert]);
  return [...found.values()];
}

/** The first of those that share a name; all of them when it is opened. */
function firingLine(same, open) {
  const { labels, activeAt } = same[0];
  const many = same.length > 1 ? [element("span", { class: "quiet" }, `×${same.length}`)] : [];
  const summary = element(
    "summary",
    {},
    element("b", {}, labels.alertname),
    ...many,
    element("span", {}, labels.severity ?? ""),
    element("span", { class: "what" }, wordsOf(same[0])),
    element("span", { class: "quiet" }, `since ${clock(Date.parse(activeAt))}`),
    ...runbookOf(same[0]),
  );
  return details(labels.alertname, `alert ${labels.severity ?? ""}`, summary, same, open);
}

function pendingLine(pending, open) {
  const names = byName(pending)
    .map(([first]) => first.labels.alertname)
    .join(", ");
  return details(
    "pending",
    "alert pending",
    element("summary", {}, element("span", { class: "quiet" }, `Pending: ${names}`)),
    pending,
    open,
  );
}

function details(key, kind, summary, alerts, open) {
  return element(
    "details",
    { class: kind, "data-alert": key, open: open.has(key) ? "" : null },
    summary,
    ...alerts.map(whole),
  );
}

function whole(alert) {
  const own = Object.entries(alert.labels).map(([name, value]) => `${name}=${value}`);
  return element(
    "div",
    {},
    element("p", {}, wordsOf(alert)),
    element("p", { class: "quiet" }, own.join("  ")),
    ...runbookOf(alert),
  );
}

function wordsOf({ annotations }) {
  return annotations.description ?? annotations.summary ?? "";
}

function runbookOf({ annotations }) {
  return annotations.runbook_url ? [element("a", { href: annotations.runbook_url, rel: "noreferrer" }, "runbook")] : [];
}

/** Events of the board's annotations: `{from, to, colour, text}` in milliseconds. */
export async function eventsOf(board, variables, { start, end }, scrapeSeconds) {
  const wanted = (board.annotations?.list ?? []).filter((each) => each.enable !== false && each.expr);
  const window = windowOf(start, end, 300, scrapeSeconds);
  const found = await Promise.all(
    wanted.map(async (each) => {
      const frames = await rangeFrames(variables.fill(each.expr, window.builtins), window);
      return frames.flatMap((frame) =>
        runs(frame, window.step * 1000).map((run) => ({
          ...run,
          colour: colour(each.iconColor ?? "blue"),
          text: textOf(each, frame.labels),
        })),
      );
    }),
  );
  return found.flat();
}

/** What the dashed lines on the boards are, newest last. */
export function drawEvents(box, events) {
  const newest = [...events].sort((a, b) => a.from - b.from).slice(-MOST_EVENTS);
  box.replaceChildren(
    ...newest.map((event) =>
      element("span", { style: `--colour: ${event.colour}` }, `${clock(event.from)} ${event.text}`),
    ),
  );
}

function textOf({ name, titleFormat, textFormat }, labels) {
  const title = nameOf({ legendFormat: titleFormat || name }, labels);
  return textFormat ? `${title}: ${nameOf({ legendFormat: textFormat }, labels)}` : title;
}

/** Stretches in which a series has samples: each is one event. */
function runs({ times, values }, step) {
  const found = [];
  times.forEach((time, at) => {
    if (!values[at]) return;
    if (found.at(-1)?.to === time - step) found.at(-1).to = time;
    else found.push({ from: time, to: time });
  });
  return found;
}
