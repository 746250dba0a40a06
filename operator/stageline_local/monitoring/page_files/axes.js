// Where ticks go and what they say. Pure but for the page's colours.

import { cssValue } from "./elements.js";
import { format, tickBase } from "./units.js";

/** What all plots share: no frame, the page's ink. */
export function plainLayout() {
  return {
    margin: { l: 8, r: 12, t: 8, b: 4 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { size: 11, color: cssValue("--quiet"), family: "system-ui, sans-serif" },
    hoverlabel: { bgcolor: cssValue("--panel"), font: { color: cssValue("--ink"), size: 11 }, namelength: 40 },
    showlegend: false,
  };
}

/** The same with the window's times, in UTC, from left to right. */
export function timeLayout(window) {
  const xaxis = {
    ...axisLook(),
    type: "date",
    range: [window.start * 1000, window.end * 1000],
    showgrid: false,
    nticks: 4,
    tickangle: 0,
    tickformat: window.end - window.start > 900 ? "%H:%M" : "%H:%M:%S",
    hoverformat: "%H:%M:%S UTC",
  };
  return { ...plainLayout(), xaxis };
}

export function axisLook() {
  return {
    gridcolor: cssValue("--grid"),
    linecolor: cssValue("--line"),
    zeroline: false,
    automargin: true,
    fixedrange: true,
  };
}

/** The value axis of series that lie between `low` and `high`. */
export function valueAxis(low, high, config) {
  const least = config.min ?? low;
  const most = Math.max(config.max ?? high, least);
  const top = most > least ? most : least + (Math.abs(least) || 1);
  const round = roundTicks(least, top, tickBase(config.unit));
  const ticks = config.decimals === 0 ? round.filter(Number.isInteger) : round;
  const room = 0.05 * (top - least);
  return {
    range: [least - (least < 0 || least > 0 ? room : 0), top + room],
    tickvals: ticks,
    ticktext: ticks.map((tick) => format(tick, config.unit)),
  };
}

/** Four to seven round values. In base 1024 they are round in KiB, MiB and so on. */
function roundTicks(least, most, base = 10) {
  const scale = base === 1024 ? 1024 ** Math.floor(Math.log(Math.max(Math.abs(most), 1)) / Math.log(1024)) : 1;
  const rough = (most - least) / scale / 5;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((each) => each * power >= rough) * power * scale;
  const ticks = [];
  for (let at = Math.ceil(least / step - 1e-9); at * step <= most * (1 + 1e-9) + step * 1e-9; at += 1) {
    ticks.push(Number((at * step).toPrecision(12)));
  }
  return ticks;
}
