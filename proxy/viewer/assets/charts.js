// The curves of runs, drawn by uPlot: points and their moving mean, with the value under the pointer, zoom, and several
// runs in one frame. The data are in the page; a page that follows its run brings new ones.

const $ = (selector) => document.querySelector(selector);
const holder = $("#charts");
const RUNS = ["--run0", "--run1", "--run2", "--run3", "--run4", "--run5"];
const HEIGHT = 230;
const WHOLE = [0, 1, 2, 3, 4, 5, 6].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));
const sync = uPlot.sync("runs");
let data = read(), plots = [];

function read() {
  return JSON.parse($("#chart-data").textContent);
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function text(value) {
  if (value == null) return "–";
  const size = Math.abs(value);
  return size >= 1e5 || (size > 0 && size < 1e-3) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

// The ends of an axis of heights. uPlot's own end at 100 where all values are 0.
function heights(_, low, high) {
  if (low == null) return [null, null];
  return low === 0 && high === 0 ? [0, 1] : uPlot.rangeNum(low, high, 0.1, true);
}

// What a chart's values lie along: the group or step itself, or another number of it.
function along(chart, columns) {
  const by = $("#along").value, values = columns[chart.name];
  if (chart.of === "step") return by === "version" ? columns.version : columns.step;
  return by === "group" ? values.map((_, at) => at + 1) : columns[by] ?? [];
}

function axisName(chart) {
  const by = $("#along").value;
  if (chart.of === "step") return by === "version" ? "weight version" : "trainer's step";
  return { group: "group, in order of completion", version: "weight version", step: "trainer's step", hours: "hours since the first group" }[by];
}

// Points of one run: of those at one place (a weight version has many groups) the mean.
function pointsOf(chart, run, wanted) {
  const columns = run[`${chart.of}s`], xs = along(chart, columns), ys = columns[chart.name];
  const places = new Map();
  for (let at = 0; at < ys.length; at++) {
    if (xs[at] == null || ys[at] == null || (chart.of === "group" && Boolean(columns.evaluation[at]) !== wanted)) continue;
    const place = places.get(xs[at]) ?? { sum: 0, count: 0, id: columns.id?.[at] };
    place.sum += ys[at];
    place.count += 1;
    places.set(xs[at], place);
  }
  const rows = [...places].sort((one, other) => one[0] - other[0]);
  return { x: rows.map(([x]) => x), y: rows.map(([, { sum, count }]) => sum / count), ids: rows.map(([, { id, count }]) => (count === 1 ? id : null)) };
}

// How many points a moving mean takes: as chosen, or by their number.
function widthOf(values) {
  return Number($("#window").value) || Math.max(1, Math.min(32, Math.floor(values.length / 12)));
}

function means(values) {
  const width = widthOf(values);
  let sum = 0;
  return values.map((value, at) => {
    sum += value - (at >= width ? values[at - width] : 0);
    return sum / Math.min(at + 1, width);
  });
}

function tablesOf(chart) {
  const log = $("#log").checked || chart.log;
  const positive = (values) => (log ? values.map((value) => (value > 0 ? value : null)) : values);
  const tables = [], series = [], ids = [];
  data.runs.forEach((run, at) => {
    const shade = colour(RUNS[at]), name = data.runs.length > 1 ? run.name : "";
    const own = pointsOf(chart, run, false);
    if (own.x.length && widthOf(own.y) === 1) { // each is its own mean
      tables.push([own.x, positive(own.y)]);
      series.push({ label: name || "value", stroke: shade, width: 1.75, points: { show: true, size: 4, fill: shade } });
      ids.push(own.ids);
    } else if (own.x.length) {
      tables.push([own.x, positive(own.y), positive(means(own.y))]);
      series.push({ label: name ? `${name}, each` : "each", stroke: shade, paths: () => null, points: { show: true, size: 4, fill: `${shade}66`, stroke: `${shade}66` } });
      series.push({ label: name || "mean", stroke: shade, width: 1.75, points: { show: false } });
      ids.push(own.ids, null);
    }
    const measured = pointsOf(chart, run, true);
    if (chart.of === "group" && measured.x.length) {
      tables.push([measured.x, positive(measured.y)]);
      series.push({ label: name ? `${name}, evaluation` : "evaluation", stroke: shade, width: 1, dash: [4, 4], points: { show: true, size: 8, fill: colour("--panel"), stroke: shade, width: 2 } });
      ids.push(measured.ids);
    }
  });
  return { joined: tables.length ? uPlot.join(tables) : [[]], series, ids, tables, log };
}

function axes(chart) {
  const font = "12px system-ui, sans-serif", stroke = colour("--dim");
  const grid = { stroke: colour("--line"), width: 1 }, ticks = { ...grid, size: 4 };
  const whole = $("#along").value === "hours" && chart.of === "group" ? {} : { incrs: WHOLE }; // no half a step
  return [
    { stroke, font, grid, ticks, ...whole, label: axisName(chart), labelFont: font, labelSize: 18, size: 32, values: (_, splits) => splits.map(text) },
    { stroke, font, grid, ticks, size: 58, label: chart.unit, labelFont: "11px system-ui, sans-serif", labelSize: 18, values: (_, splits) => splits.map((each) => (each == null ? "" : text(each))) },
  ];
}

function draw(chart) {
  const place = document.createElement("section"), head = document.createElement("header"), body = document.createElement("div");
  place.className = "panel curve";
  head.textContent = chart.title;
  body.setAttribute("role", "img");
  const { joined, series, ids, log } = tablesOf(chart);
  const count = joined[0].length;
  body.setAttribute("aria-label", `${chart.title}, ${chart.unit}, along ${axisName(chart)}: ${count} values; the last ones stand in the table below`);
  place.append(head, body);
  holder.append(place);
  if (!count) {
    body.textContent = `no values along ${axisName(chart)}`;
    body.className = "pad dim";
    return;
  }
  const options = {
    width: Math.max(200, body.clientWidth), height: HEIGHT, series: [{ label: axisName(chart).split(",")[0], value: (_, value) => text(value) }, ...series.map((each) => ({ spanGaps: true, value: (_, value) => text(value), ...each }))],
    axes: axes(chart), scales: { x: { time: false }, y: log ? { distr: 3 } : { range: heights } },
    cursor: { sync: { key: sync.key, scales: ["x", null] }, drag: { x: true, y: false }, points: { size: 7 } },
    legend: { live: true },
  };
  const plot = new uPlot(options, joined, body);
  if (data.links) plot.over.addEventListener("click", () => openGroup(plot, ids));
  plots.push({ plot, body });
}

function openGroup(plot, ids) {
  if (plot.select.width > 0 || plot.cursor.idx == null) return;
  const at = plot.cursor.idxs.findIndex((index, series) => series > 0 && index != null && ids[series - 1] && plot.data[series][index] != null);
  const x = at > 0 ? plot.data[0][plot.cursor.idxs[at]] : null;
  const place = x == null ? -1 : placeOf(plot, at, x);
  const id = place >= 0 ? ids[at - 1][place] : null;
  if (id) location.href = `/view/groups/${encodeURIComponent(id)}`;
}

// The position of x among the series' own points: the joined table has those of all series.
function placeOf(plot, series, x) {
  let at = -1;
  for (let row = 0; row < plot.data[0].length && plot.data[0][row] <= x; row++) if (plot.data[series][row] !== undefined) at++;
  return at;
}

function drawAll() {
  for (const { plot } of plots) plot.destroy();
  plots = [];
  holder.replaceChildren();
  for (const chart of data.charts) draw(chart);
}

$("#chart-bar").hidden = !data.charts.length;
for (const control of ["#along", "#window", "#log"]) $(control).addEventListener("change", drawAll);
document.addEventListener("themechange", drawAll);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
document.addEventListener("rolltap:news", () => { data = read(); drawAll(); });
new ResizeObserver(() => {
  for (const { plot, body } of plots) if (body.clientWidth !== plot.width) plot.setSize({ width: body.clientWidth, height: HEIGHT });
}).observe(holder);
if (data.runs.length > 1) $("#along").value = "version";
drawAll();
