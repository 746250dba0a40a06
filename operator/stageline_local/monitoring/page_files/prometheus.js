// Questions to Prometheus, through the server that this page came from.

/** The answer's `data`; throws an Error with Prometheus' own words. */
export async function ask(path, parameters = null) {
  const options = parameters === null ? {} : { method: "POST", body: new URLSearchParams(parameters) };
  let answer;
  try {
    answer = await (await fetch(`prometheus/api/v1/${path}`, options)).json();
  } catch (error) {
    throw new Error(`no answer from this page's server: ${error.message}`);
  }
  if (answer.status !== "success") throw new Error(answer.error || "Prometheus gave no reason");
  return answer.data;
}

const STEPS = [1, 2, 5, 10, 15, 20, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 43200, 86400];

/** Of seconds that a single value is a rate over: of a slow model nothing may have ended in the last few. */
const SHORTEST_INSTANT = 60;

/** From when to when, in which steps, and what `$__rate_interval` is there and for a single value. All in seconds. */
export function windowOf(start, end, maxPoints, scrapeSeconds) {
  const wanted = Math.max((end - start) / maxPoints, scrapeSeconds);
  const step = STEPS.find((each) => each >= wanted) ?? Math.ceil(wanted / 86400) * 86400;
  const first = Math.floor(start / step) * step;
  const rateSeconds = Math.max(step + scrapeSeconds, 4 * scrapeSeconds);
  return {
    start: first,
    end,
    step,
    builtins: { __rate_interval: `${rateSeconds}s` },
    instantBuiltins: { __rate_interval: `${Math.max(rateSeconds, SHORTEST_INSTANT)}s` },
  };
}

/** One frame per series: its labels, times in milliseconds and values, with null where a step has no sample. */
export async function rangeFrames(expression, window) {
  const data = await ask("query_range", { query: expression, start: window.start, end: window.end, step: window.step });
  const count = Math.floor((window.end - window.start) / window.step) + 1;
  const times = Array.from({ length: count }, (_, at) => Math.round((window.start + at * window.step) * 1000));
  return data.result.map((series) => {
    const values = new Array(count).fill(null);
    for (const [time, text] of series.values) {
      values[Math.round((time - window.start) / window.step)] = numberOf(text);
    }
    return { labels: series.metric, times, values };
  });
}

/** The same for an expression at one moment. */
export async function instantFrames(expression, window) {
  const data = await ask("query", { query: expression, time: window.end });
  return data.result.map((series) => ({
    labels: series.metric,
    times: [series.value[0] * 1000],
    values: [numberOf(series.value[1])],
  }));
}

function numberOf(text) {
  if (text === "+Inf") return Infinity;
  if (text === "-Inf") return -Infinity;
  const value = Number(text);
  return Number.isNaN(value) ? null : value;
}
