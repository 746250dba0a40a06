// One number of many: what a panel's calculations come to. Pure.

const REDUCERS = {
  last: (values) => values.at(-1) ?? null,
  lastNotNull: (values) => values.findLast((value) => value !== null) ?? null,
  first: (values) => values[0] ?? null,
  firstNotNull: (values) => values.find((value) => value !== null) ?? null,
  max: (values) => (known(values).length ? Math.max(...known(values)) : null),
  min: (values) => (known(values).length ? Math.min(...known(values)) : null),
  sum: (values) => (known(values).length ? known(values).reduce((sum, each) => sum + each, 0) : null),
  mean: (values) => (known(values).length ? REDUCERS.sum(values) / known(values).length : null),
  count: (values) => known(values).length,
  range: (values) => (known(values).length ? REDUCERS.max(values) - REDUCERS.min(values) : null),
  delta: (values) => (known(values).length ? known(values).at(-1) - known(values)[0] : null),
};
export const CALC_NAMES = {
  lastNotNull: "Last",
  last: "Last",
  max: "Max",
  min: "Min",
  mean: "Mean",
  sum: "Total",
  count: "Count",
  first: "First",
  firstNotNull: "First",
  range: "Range",
  delta: "Delta",
};

function known(values) {
  return values.filter((value) => value !== null);
}

/** One number of many; throws for a calculation that this page does not know. */
export function reduce(values, calculation) {
  const reducer = REDUCERS[calculation];
  if (!reducer) throw new Error(`this page does not know the calculation ${calculation}`);
  return reducer(values);
}
