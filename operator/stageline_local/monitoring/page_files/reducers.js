// One number of many: what a panel's calculations come to. Pure.

const REDUCERS = {
  lastNotNull: (values) => values.findLast((value) => value !== null) ?? null,
  max: (values) => {
    const known = values.filter((value) => value !== null);
    return known.length ? Math.max(...known) : null;
  },
};
export const CALC_NAMES = { lastNotNull: "Last", max: "Max" };

/** One number of many; throws for a calculation that this page does not know. */
export function reduce(values, calculation) {
  const reducer = REDUCERS[calculation];
  if (!reducer) throw new Error(`this page does not know the calculation ${calculation}`);
  return reducer(values);
}
