// Line charts in plain SVG. Gaps in the data are gaps in the line; nothing is drawn that was not reported.

import { h, svg } from "./dom.js";
import { clockTime } from "./format.js";

const PLOT = { left: 44, right: 6, top: 8, bottom: 20 };

// lines: [{name, points: [[seconds, value or null], ...]}]; options: name, show(value), width, height, low, high, marks.
export function lineChart(lines, options) {
  const height = options.height || 120;
  const width = Math.max(260, options.width || 320);
  const points = lines.flatMap((line) => line.points).filter(([, value]) => value !== null && Number.isFinite(value));
  const last = lines.map((line) => [...line.points].reverse().find(([, value]) => value !== null)).find(Boolean);
  const caption = h("figcaption", {}, options.name, last && lines.length === 1 ? h("b", {}, options.show(last[1])) : null);
  if (points.length < 1) return h("figure", { class: "chart" }, caption, h("p", { class: "muted" }, "Not reported."));
  const times = points.map(([time]) => time);
  const values = points.map(([, value]) => value);
  const [from, to] = [Math.min(...times), Math.max(...times)];
  let low = options.low ?? Math.min(...values);
  let high = options.high ?? Math.max(...values);
  if (high - low < Math.abs(high) * 1e-6 + 1e-12) [low, high] = low === 0 ? [0, 1] : [low - Math.abs(low) * 0.05, high + Math.abs(high) * 0.05];
  const x = (time) => PLOT.left + (to > from ? (time - from) / (to - from) : 0.5) * (width - PLOT.left - PLOT.right);
  const y = (value) => height - PLOT.bottom - ((value - low) / (high - low)) * (height - PLOT.top - PLOT.bottom);
  const grid = [low, (low + high) / 2, high].map((value) => [
    svg("line", { class: "grid", x1: PLOT.left, x2: width - PLOT.right, y1: y(value), y2: y(value) }),
    svg("text", { x: PLOT.left - 5, y: y(value) + 3.5, "text-anchor": "end" }, short(options.show(value))),
  ]);
  const marks = (options.marks || []).filter((time) => time >= from && time <= to).map((time) => svg("line", { class: "mark", x1: x(time), x2: x(time), y1: PLOT.top, y2: height - PLOT.bottom }));
  const drawn = lines.map((line, index) => {
    const single = line.points.filter(([, value]) => value !== null).length === 1;
    if (single) {
      const [time, value] = line.points.find(([, found]) => found !== null);
      return svg("circle", { class: "dot", cx: x(time), cy: y(value), r: 3 });
    }
    return svg("path", { class: "line", "data-series": index, d: path(line.points, x, y) });
  });
  const label = `${options.name}: from ${options.show(values[0])} at ${clockTime(from)} to ${last ? options.show(last[1]) : "unknown"} at ${clockTime(to)}`;
  const picture = svg(
    "svg",
    { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
    grid,
    marks,
    drawn,
    svg("text", { x: PLOT.left, y: height - 5 }, clockTime(from)),
    svg("text", { x: width - PLOT.right, y: height - 5, "text-anchor": "end" }, clockTime(to)),
  );
  return h("figure", { class: "chart" }, caption, picture);
}

function path(points, x, y) {
  let text = "";
  let open = false;
  for (const [time, value] of points) {
    if (value === null || !Number.isFinite(value)) open = false;
    else {
      text += `${open ? "L" : "M"}${x(time).toFixed(1)} ${y(value).toFixed(1)}`;
      open = true;
    }
  }
  return text;
}

function short(text) {
  return text.replace("not reported", "").replace("< 0.1 %", "0 %");
}

export function lineKeys(names) {
  return h(
    "div",
    { class: "keys" },
    names.map((name, index) => h("span", {}, svg("svg", { viewBox: "0 0 26 10", "aria-hidden": "true" }, svg("line", { "data-series": index, x1: 0, x2: 26, y1: 5, y2: 5 })), name)),
  );
}
