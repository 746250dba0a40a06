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
const FORMATS = {
  none: digits,
  short,
  s: duration,
  percentunit: (value, decimals) => `${digits(value * 100, decimals)}%`,
  bytes: (value, decimals) => scaled(value, "B", IEC, 1024, decimals),
  Bps: (value, decimals) => scaled(value, "B/s", SI, 1000, decimals),
  reqps: (value, decimals) => `${short(value, decimals)} req/s`,
  ops: (value, decimals) => `${short(value, decimals)} ops/s`,
};

/** `value` in `unit`; `decimals` undefined takes as many as three significant digits need. */
export function format(value, unit = "none", decimals = undefined) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === Infinity) return "∞";
  if (value === -Infinity) return "−∞";
  if (unit.startsWith("suffix:")) return `${short(value, decimals)} ${unit.slice(7).trim()}`;
  if (!(unit in FORMATS)) throw new Error(`this page does not know the unit ${unit}`);
  return FORMATS[unit](value, decimals);
}

/** Steps between axis ticks are round in this base: bytes of 1024, everything else of 10. */
export function tickBase(unit) {
  return unit === "bytes" ? 1024 : 10;
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

function scaled(value, name, prefixes, base, decimals) {
  const size = Math.abs(value);
  const power = size < base ? 0 : Math.min(prefixes.length - 1, Math.floor(Math.log(size * 1.0001) / Math.log(base)));
  return `${digits(value / base ** power, decimals)} ${prefixes[power]}${name}`;
}
