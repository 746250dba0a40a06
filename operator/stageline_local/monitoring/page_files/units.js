// Numbers as people read them, by Grafana's unit ids. Nothing here knows of panels.

const DURATIONS = [
  [1e-9, "ns"],
  [1e-6, "µs"],
  [1e-3, "ms"],
  [1, "s"],
  [60, "min"],
  [3600, "h"],
  [86400, "d"],
];
const DECIMAL = [
  [1, ""],
  [1e3, " K"],
  [1e6, " Mil"],
  [1e9, " Bil"],
  [1e12, " Tri"],
];
const SI = ["", "k", "M", "G", "T", "P"];
const IEC = ["", "Ki", "Mi", "Gi", "Ti", "Pi"];
const SECONDS_OF = { ns: 1e-9, µs: 1e-6, us: 1e-6, ms: 1e-3, s: 1, m: 60, h: 3600, d: 86400 };
const PER_SECOND = {
  reqps: "req/s",
  ops: "ops/s",
  cps: "c/s",
  wps: "wr/s",
  rps: "rd/s",
  iops: "io/s",
  eps: "evt/s",
  mps: "msg/s",
  tps: "tok/s",
};
const BYTES = {
  bytes: ["B", IEC, 1024],
  decbytes: ["B", SI, 1000],
  Bps: ["B/s", SI, 1000],
  binBps: ["B/s", IEC, 1024],
  bps: ["b/s", SI, 1000],
  bits: ["b", IEC, 1024],
};

/** `value` in `unit`; `decimals` undefined takes as many as three significant digits need. */
export function format(value, unit = "none", decimals = undefined) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === Infinity) return "∞";
  if (value === -Infinity) return "−∞";
  if (unit in SECONDS_OF) return duration(value * SECONDS_OF[unit], decimals);
  if (unit === "dtdurations") return longDuration(value);
  if (unit === "percent") return `${digits(value, decimals)}%`;
  if (unit === "percentunit") return `${digits(value * 100, decimals)}%`;
  if (unit in BYTES) return scaled(value, ...BYTES[unit], decimals);
  if (unit in PER_SECOND) return `${short(value, decimals)} ${PER_SECOND[unit]}`;
  if (unit.startsWith("dateTime")) return new Date(value).toISOString().replace("T", " ").slice(0, 19);
  if (unit.startsWith("bool")) return (value ? ["Yes", "True", "On"] : ["No", "False", "Off"])[boolWords(unit)];
  if (unit === "short") return short(value, decimals);
  if (unit === "none" || unit === "" || unit === "string") return digits(value, decimals);
  if (unit.startsWith("suffix:")) return `${short(value, decimals)} ${unit.slice(7).trim()}`;
  if (unit.startsWith("prefix:")) return `${unit.slice(7)}${short(value, decimals)}`;
  return `${short(value, decimals)} ${unit}`;
}

/** Steps between axis ticks are round in this base: bytes of 1024, times of 60, everything else of 10. */
export function tickBase(unit) {
  return unit in BYTES && BYTES[unit][2] === 1024 ? 1024 : 10;
}

function boolWords(unit) {
  return unit.endsWith("on_off") ? 2 : unit.endsWith("yes_no") ? 0 : 1;
}

function digits(value, decimals) {
  if (decimals !== undefined && decimals !== null) return value.toFixed(decimals);
  const size = Math.abs(value);
  if (size === 0 || Number.isInteger(value)) return String(value);
  if (size < 0.001) return value.toExponential(1);
  return String(Number(value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3)));
}

function pick(size, table) {
  let found = table[0];
  for (const entry of table) if (size >= entry[0] * 0.9999) found = entry;
  return found;
}

function short(value, decimals) {
  const [factor, name] = Math.abs(value) < 1000 ? [1, ""] : pick(Math.abs(value), DECIMAL);
  return digits(value / factor, decimals) + name;
}

function duration(seconds, decimals) {
  if (seconds === 0) return "0 s";
  const [factor, name] = pick(Math.abs(seconds), DURATIONS);
  return `${digits(seconds / factor, decimals)} ${name}`;
}

function longDuration(seconds) {
  const parts = [];
  let rest = Math.round(seconds);
  for (const [size, name] of [
    [86400, "d"],
    [3600, "h"],
    [60, "min"],
    [1, "s"],
  ]) {
    if (rest >= size || (name === "s" && !parts.length)) parts.push(`${Math.floor(rest / size)} ${name}`);
    rest %= size;
  }
  return parts.slice(0, 2).join(" ");
}

function scaled(value, name, prefixes, base, decimals) {
  const size = Math.abs(value);
  const power = size < base ? 0 : Math.min(prefixes.length - 1, Math.floor(Math.log(size * 1.0001) / Math.log(base)));
  return `${digits(value / base ** power, decimals)} ${prefixes[power]}${name}`;
}
