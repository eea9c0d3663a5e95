// The last hour as lines, drawn by uPlot. Lines differ in dash as well as in colour; the legend carries both, and the numbers.

import { byId, h } from "./dom.js";
import * as f from "./format.js";
import { STEPS } from "./words.js";

const LINES = [
  ["evidence", [2, 3], 1.5],
  ["placed", [8, 4], 1.5],
  ["hinted", [12, 3, 2, 3], 1.5],
  ["materialized", [], 2.5],
];
const HEIGHT = 220;
const MIN_SPAN = 600;
const MAX_SPAN = 3600;

let plot = null;
let data = null;
let width = 10;
const outputs = new Map();

export function startCourse() {
  const legend = byId("legend");
  for (const [name, dash, weight] of LINES) {
    const output = h("output", {}, f.DASH);
    outputs.set(name, output);
    legend.append(h("li", {}, sample(name, dash, weight), STEPS[name][0], output));
  }
  new ResizeObserver(() => plot?.setSize({ width: byId("chart").clientWidth, height: HEIGHT })).observe(byId("chart"));
}

export function course(s) {
  data = series(s);
  const placed = sum(s.course.placed);
  const materialized = sum(s.course.materialized);
  byId("course-note").textContent = s.course.start.length
    ? `Tokens of the routes that closed in each ${width === 60 ? "minute" : `${width} seconds`}. In all ${f.count(placed)} placed and ${f.count(materialized)} materialized.`
    : "No route has closed in the last hour.";
  if (plot === null) draw();
  else plot.setData(data);
  readout(null);
}

/** Colours come from the theme, so a change of theme draws anew. */
export function redrawCourse() {
  plot?.destroy();
  plot = null;
  if (data !== null) draw();
}

const sum = (values) => values.reduce((total, value) => total + value, 0);

/** Buckets in which nothing closed are zeros: a gap would read as "unknown". Long spans take wider buckets, or every line is noise. The one
 * that is still filling is left out, as it would read as a fall; but not from a short course, which is what one watches. */
function series(s) {
  const { start, bucket_seconds: fine } = s.course;
  const end = Math.floor(s.now / fine) * fine;
  // Bounded, because the clocks of the router and of the broker, which dates the past, need not agree.
  const span = Math.min(Math.max(end - (start[0] ?? end), MIN_SPAN), MAX_SPAN);
  width = fine * (span <= 900 ? 1 : span <= 1800 ? 3 : 6);
  const last = Math.floor(end / width) * width;
  const first = Math.floor((last - span) / width) * width;
  const times = [];
  const filling = width === fine && start[start.length - 1] >= last;
  for (let at = first; filling ? at <= last : at < last; at += width) times.push(at);
  const sums = LINES.map(() => new Array(times.length).fill(0));
  start.forEach((at, i) => {
    const place = Math.floor((at - first) / width);
    if (place >= 0 && place < times.length) LINES.forEach(([name], line) => (sums[line][place] += s.course[name][i]));
  });
  return [times, ...sums];
}

function draw() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  const font = `12px ${getComputedStyle(document.body).fontFamily}`;
  const axis = { stroke: colour("muted"), font, grid: { stroke: colour("line"), width: 1 }, ticks: { show: false } };
  const box = byId("chart");
  plot = new window.uPlot(
    {
      width: box.clientWidth,
      height: HEIGHT,
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false } },
      scales: { x: { time: true }, y: { range: (_, low, high) => [0, Math.max(high * 1.05, 10)] } },
      axes: [
        { ...axis, values: (_, ticks) => ticks.map((tick) => f.time(tick).slice(0, 5)), space: 70, size: 30 },
        { ...axis, values: (_, ticks) => ticks.map((tick) => f.compact(tick)), size: 54 },
      ],
      series: [{}, ...LINES.map(([name, dash, weight]) => ({ label: name, stroke: colour(name), width: weight, dash, points: { show: false } }))],
      hooks: { setCursor: [(self) => readout(self.cursor.idx)] },
    },
    data,
    box,
  );
}

/** Numbers under the cursor, else of the newest bucket. */
function readout(at) {
  const index = at ?? data[0].length - 1;
  LINES.forEach(([name], i) => {
    outputs.get(name).textContent = f.compact(data[i + 1][index]);
  });
}

function sample(name, dash, weight) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 30 10");
  svg.setAttribute("aria-hidden", "true");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
  for (const [key, value] of Object.entries({ x1: 0, y1: 5, x2: 30, y2: 5, "stroke-width": weight + 0.5, "stroke-dasharray": dash.join(" ") })) line.setAttribute(key, value);
  line.style.setProperty("stroke", `var(--${name})`);
  svg.append(line);
  return svg;
}
