// The page: reads a Grafana board's JSON, asks Prometheus, draws, and does so again every few seconds.
// What is looked at stands in the address: ?board=…&range=seconds&end=unix seconds&var-name=…

import { drawAlerts, drawEvents, eventsOf } from "./alerts.js";
import { clock, element } from "./elements.js";
import { buildSection, sectionsOf } from "./layout.js";
import { windowOf } from "./prometheus.js";
import { Variables } from "./variables.js";

const RANGES = [
  ["5 min", 300],
  ["15 min", 900],
  ["1 h", 3600],
  ["6 h", 21600],
  ["24 h", 86400],
];
// A board's own range and refresh suit a cluster that is scraped twice a minute; here things are newer.
const RANGE_SECONDS = 900;
const REFRESH_SECONDS = 10;
const byId = (id) => document.getElementById(id);
const address = new URLSearchParams(location.search);
let paused = address.has("end");
let shown = null;

async function main() {
  const facts = await (await fetch("facts")).json();
  const wanted = address.get("board") ?? facts.boards[0]?.name;
  if (!facts.boards.length) throw new Error("no boards are installed");
  const name = facts.boards.find((each) => each.name === wanted || each.uid === wanted)?.name;
  if (!name) throw new Error(`there is no board ${wanted}`);
  const board = await (await fetch(`boards/${encodeURIComponent(name)}`)).json();
  const chosen = {};
  for (const [key, value] of address)
    if (key.startsWith("var-")) (chosen[key.slice(4)] ??= []).push(value === "All" ? "$__all" : value);
  const variables = new Variables(board.templating?.list ?? [], chosen);
  shown = { facts, board, variables, sections: [], variableText: null };
  dress(facts, board, name);
  await refresh();
  setInterval(() => {
    if (!paused && !document.hidden) refresh();
  }, REFRESH_SECONDS * 1000);
}

/** Heading, links to the other boards, and what can be chosen. */
function dress(facts, board, name) {
  document.title = `${board.title} · Stageline`;
  byId("title").textContent = `Stageline: ${facts.model ?? ""}`;
  byId("boards").replaceChildren(
    ...facts.boards.map((each) =>
      element(
        "a",
        {
          href: `?${withParameters({ board: each.name }, ["var-", "board"])}`,
          "aria-current": each.name === name ? "page" : null,
        },
        each.title.split(" / ").at(-1),
      ),
    ),
    ...(board.links ?? [])
      .filter((link) => link.type === "link")
      .map((link) => element("a", { href: link.url, title: link.tooltip }, link.title)),
  );
  const seconds = rangeSeconds();
  const options = RANGES.some(([, each]) => each === seconds) ? RANGES : [...RANGES, [`${seconds} s`, seconds]];
  byId("range").replaceChildren(
    ...options.map(([text, each]) => element("option", { value: each, selected: each === seconds ? "" : null }, text)),
  );
  byId("range").addEventListener("change", () => go({ range: byId("range").value }));
  byId("pause").addEventListener("click", () => {
    paused = !paused;
    byId("pause").setAttribute("aria-pressed", String(paused));
    byId("pause").textContent = paused ? "Go on" : "Pause";
  });
  const speed = facts.alert_speed === 1 ? "" : ` Drill: alerts fire after 1/${facts.alert_speed} of their usual time.`;
  byId("foot").replaceChildren(
    `Drawn by Stageline from the Grafana board's own JSON; this is not Grafana. Times are UTC.${speed} `,
    element("a", { href: facts.prometheus }, "Prometheus"),
  );
}

function rangeSeconds() {
  const given = Number(address.get("range"));
  return given > 0 ? given : RANGE_SECONDS;
}

/** Draw everything that is open, with the newest data. */
async function refresh() {
  const { facts, board, variables } = shown;
  const end = Number(address.get("end")) || Date.now() / 1000;
  const range = { start: end - rangeSeconds(), end };
  const scrape = facts.scrape_interval_seconds;
  try {
    await variables.load(windowOf(range.start, range.end, 300, scrape));
    rebuildIfChanged();
    const events = await eventsOf(board, variables, range, scrape);
    const panels = shown.sections.filter((section) => section.isOpen()).flatMap((section) => section.panels);
    drawEvents(byId("events"), events);
    await Promise.all([drawAlerts(byId("alerts")), ...panels.map((panel) => panel.refresh(range, scrape, events))]);
    shown.at = end * 1000;
    byId("notice").textContent = "";
    document.body.dataset.state = "drawn";
  } catch (error) {
    // Panels that have something keep it; the reader learns how old it is.
    byId("notice").textContent = `Nothing new since ${clock(shown.at ?? Date.now())} UTC: ${error.message}`;
    document.body.dataset.state = "stale";
  }
}

/** Panels are made anew only when a variable has other values than before: repeated panels follow it. */
function rebuildIfChanged() {
  const { board, variables } = shown;
  const text = JSON.stringify(variables.list.map((each) => [each.options, each.values]));
  if (text === shown.variableText) return;
  shown.variableText = text;
  shown.sections = sectionsOf(board).map((section) => buildSection(section, variables, refresh));
  byId("board").replaceChildren(...shown.sections.map((section) => section.box));
  byId("variables").replaceChildren(...variables.shown().map(choice));
}

function choice(variable) {
  const all = variable.includeAll ? [["All", "$__all"]] : [];
  const options = [...all, ...variable.options.map((value) => [value, value])];
  const select = element(
    "select",
    { id: `var-${variable.name}` },
    ...options.map(([text, value]) =>
      element("option", { value, selected: variable.values.includes(value) ? "" : null }, text),
    ),
  );
  select.addEventListener("change", () => go({ [`var-${variable.name}`]: select.value }));
  return element("span", {}, element("label", { for: select.id }, `${variable.label || variable.name} `), select);
}

function withParameters(changes, dropped = []) {
  const next = new URLSearchParams([...address].filter(([key]) => !dropped.some((prefix) => key.startsWith(prefix))));
  for (const [key, value] of Object.entries(changes)) next.set(key, value);
  return next;
}

function go(changes) {
  location.search = withParameters(changes).toString();
}

main().catch((error) => {
  byId("notice").textContent = error.message;
  document.body.dataset.state = "failed";
});
