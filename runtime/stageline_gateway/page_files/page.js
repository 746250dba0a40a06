"use strict";
// Everything shown is asked of this gateway; text from outside enters the page as text only, never as markup.

const find = (id) => document.getElementById(id);
const state = { key: sessionStorage.getItem("key") || "", models: [], turns: [], asking: null, paused: false };

function headers() {
  return state.key ? { authorization: "Bearer " + state.key } : {};
}

function node(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

async function refusalOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return "The gateway answered with status " + response.status + ".";
  }
}

async function ask(path) {
  const response = await fetch(path, { headers: headers(), signal: AbortSignal.timeout(15000) });
  if (response.status === 401) find("key-form").hidden = false;
  if (!response.ok) throw new Error(await refusalOf(response));
  return response.json();
}

function say(problem) {
  if (find("notice").textContent !== problem) find("notice").textContent = problem;
}

// Models and groups

function fill(select, options) {
  const wanted = JSON.stringify(options);
  if (select.dataset.options === wanted) return;
  const chosen = select.value;
  select.replaceChildren(...options.map(([value, text]) => Object.assign(node("option", text), { value })));
  if (options.some(([value]) => value === chosen)) select.value = chosen;
  select.dataset.options = wanted;
}

function rowsOf(model) {
  return model.groups.map((group) => {
    const row = node("tr");
    const cell = node("td");
    const word = group.draining ? "draining" : group.ready ? "ready" : "not ready";
    cell.append(node("span", word, group.ready ? "ready" : "unready"));
    if (group.message) cell.append(" " + group.message);
    row.append(node("td", model.id), node("td", group.group), cell, node("td", group.incarnation));
    return row;
  });
}

async function showModels() {
  const answer = await ask("v1/models");
  state.models = answer.data;
  const rows = state.models.flatMap(rowsOf);
  if (!rows.length) {
    const row = node("tr");
    row.append(Object.assign(node("td", "No model is served."), { colSpan: 4 }));
    rows.push(row);
  }
  find("models").replaceChildren(...rows);
  fill(find("model"), state.models.map((model) => [model.id, model.id]));
  fill(find("group"), state.models.flatMap((model) =>
    model.groups.map((group) => [JSON.stringify([model.id, group.group]), model.id + " / " + group.group])));
}

// The pipeline

function paint(canvas, stage) {
  const style = getComputedStyle(document.documentElement);
  const columns = stage.busy.length;
  const height = 100;
  canvas.width = columns * 4;
  canvas.height = height;
  const brush = canvas.getContext("2d");
  brush.fillStyle = style.getPropertyValue("--idle");
  brush.fillRect(0, 0, canvas.width, height);
  for (let column = 0; column < columns; column++) {
    const busy = stage.busy[column];
    brush.fillStyle = style.getPropertyValue("--wait");
    brush.fillRect(column * 4, height - busy - stage.wait[column], 4, stage.wait[column]);
    brush.fillStyle = style.getPropertyValue("--busy");
    brush.fillRect(column * 4, height - busy, 4, busy);
  }
}

const percent = (part, whole) => Math.round((100 * part) / whole) + " %";

function told(stage, whole) {
  const parts = { busy: 0, wait: 0 };
  const reasons = [];
  for (const [name, seconds] of Object.entries(stage.seconds)) {
    const [kind, detail] = name.split(".");
    if (kind in parts) parts[kind] += seconds;
    if (kind === "wait" && seconds / whole >= 0.01) reasons.push(detail + " " + percent(seconds, whole));
  }
  const why = reasons.length ? " (for " + reasons.join(", ") + ")" : "";
  return "busy " + percent(parts.busy, whole) + ", waiting " + percent(parts.wait, whole) + why;
}

function laneFor(index) {
  const lanes = find("lanes");
  while (lanes.children.length <= index) {
    const lane = node("div", undefined, "lane");
    const canvas = node("canvas");
    canvas.setAttribute("role", "img");
    lane.append(node("span"), canvas, node("p"));
    lanes.append(lane);
  }
  return lanes.children[index];
}

function draw(picture) {
  const lanes = find("lanes");
  lanes.querySelector(".axis")?.remove();
  picture.stages.forEach((stage, index) => {
    const [name, canvas, text] = laneFor(index).children;
    name.textContent = "stage " + stage.stage;
    paint(canvas, stage);
    text.textContent = told(stage, picture.window_seconds);
    canvas.setAttribute("aria-label", "Stage " + stage.stage + ": " + text.textContent);
  });
  while (lanes.children.length > picture.stages.length) lanes.lastChild.remove();
  const axis = node("div", undefined, "axis");
  axis.append(node("span", picture.window_seconds + " s ago"), node("span", "now"));
  lanes.append(axis);
  find("bubble").textContent = picture.bubble_ratio === null
    ? "No work in these " + picture.window_seconds + " seconds."
    : "Bubble: " + percent(picture.bubble_ratio, 1) + " of the time with work, stages waited.";
}

async function showPipeline() {
  if (state.paused || document.hidden || !find("group").value) return;
  const [model, group] = JSON.parse(find("group").value);
  const query = new URLSearchParams({ model, group, window_seconds: find("window").value });
  try {
    draw(await ask("pipeline?" + query));
  } catch (error) {
    find("bubble").textContent = error.message;
    find("lanes").replaceChildren();
  }
}

// Chat

function turn(text, className) {
  const made = node("p", text, className);
  find("talk").append(made);
  made.scrollIntoView({ block: "end" });
  return made;
}

async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
    }
  }
}

async function stream(shown, signal) {
  const body = { model: find("model").value, messages: state.turns, stream: true, stream_options: { include_usage: true } };
  const began = performance.now();
  const response = await fetch("v1/chat/completions", {
    method: "POST", signal, headers: { "content-type": "application/json", ...headers() }, body: JSON.stringify(body),
  });
  if (response.status === 401) find("key-form").hidden = false;
  if (!response.ok) throw new Error(await refusalOf(response));
  for await (const event of eventsOf(response)) {
    if (event.error) throw new Error(event.error.message);
    shown.textContent += event.choices[0]?.delta.content ?? "";
    find("talk").scrollTop = find("talk").scrollHeight;
    if (event.usage) {
      const seconds = (performance.now() - began) / 1000;
      find("speed").textContent = event.usage.completion_tokens + " tokens in " + seconds.toFixed(1) + " s";
    }
  }
}

async function chat() {
  const text = find("prompt").value.trim();
  if (!text || state.asking) return;
  find("prompt").value = "";
  state.turns.push({ role: "user", content: text });
  turn(text, "you");
  const shown = turn("", "model");
  state.asking = new AbortController();
  find("send").disabled = true;
  find("stop").disabled = false;
  try {
    await stream(shown, state.asking.signal);
  } catch (error) {
    if (error.name !== "AbortError") turn(error.message, "failed");
  }
  state.turns.push({ role: "assistant", content: shown.textContent });
  state.asking = null;
  find("send").disabled = false;
  find("stop").disabled = true;
}

// What makes it go

async function refresh(what, every) {
  try {
    await what();
    if (what === showModels) say("");
  } catch (error) {
    say(error.message);
  }
  setTimeout(refresh, every, what, every);
}

find("chat").addEventListener("submit", (event) => { event.preventDefault(); chat(); });
find("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); chat(); }
});
find("stop").addEventListener("click", () => state.asking?.abort());
find("clear").addEventListener("click", () => { state.turns = []; find("talk").replaceChildren(); });
find("pause").addEventListener("click", (event) => {
  state.paused = !state.paused;
  event.target.setAttribute("aria-pressed", String(state.paused));
});
find("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  state.key = find("key").value.trim();
  sessionStorage.setItem("key", state.key);
  showModels().then(() => say(""), (error) => say(error.message));
});
refresh(showModels, 2000);
refresh(showPipeline, 1000);
