// The page of runs: report.html has its data in it, the dashboard asks for it every few seconds.
// Text out of a run folder is only ever set as textContent.
"use strict";
const POLL_MS = 2000, POINTS = 1200;
const COLORS = ["#2f6fde", "#e0662f", "#1f9d6b", "#a04bd1", "#c2a000", "#d6336c", "#0e9aa7", "#7a6a53"];
const PARTS = {
  steps: "#2f6fde", data: "#e0662f", saving: "#c2a000", "between starts": "#c0262d", other: "#9aa5b5",
  forward: "#2f6fde", backward: "#1f4fa8", W: "#6fa0f0", optimizer: "#1f9d6b", slowest: "#d6336c", idle: "#9aa5b5",
  host: "#7a6a53",
};
const AXES = "#e0862f";
// Names of metrics.jsonl; a name that is in no chart here gets one of its own.
const CHARTS = [
  { title: "loss", unit: "nats per token", names: [/^loss$/, /^validation_loss/, /^test_loss/], smooth: true, log: true },
  { title: "gradient norm", names: [/^grad_norm$/], smooth: true },
  { title: "tokens a second", unit: "all ranks", names: [/^tokens_per_second$/], smooth: true },
  { title: "time of a step", unit: "s", names: [/^step_seconds$/, /^data_seconds$/], smooth: true },
  { title: "MFU", unit: "%", names: [/^mfu$/], scale: 100, smooth: true },
  { title: "learning rate", names: [/^lr$/] },
  { title: "peak memory of rank 0", unit: "GiB", names: [/^peak_memory_bytes$/], scale: 1 / 2 ** 30 },
  { title: "bytes sent by rank 0 in a step", unit: "MiB", names: [/^comm_bytes\//], scale: 1 / 2 ** 20 },
  { title: "fullest expert", unit: "÷ mean of its layer", names: [/^expert_load_max$/] },
  { title: "samples so far", names: [/^consumed_samples$/] },
  { title: "TFLOP/s of a device", names: [/^tflops_per_device$/], smooth: true },
];
const STATES = { "at work": "good", starts: "good", done: "good", "stands still": "bad", failed: "bad", gone: "bad", stopped: "warn" };
const MARKED = { fault: "#c0262d", restart: "#e0662f", spike: "#a04bd1", straggler: "#c2a000", stall: "#c0262d" };

const given = JSON.parse(document.getElementById("data").textContent);
const live = given.live;
let runs = given.runs, details = given.details || [], range = null, hidden = new Set(), drawn = [];

const get = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "style") Object.assign(node.style, value); else node[name] = value;
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}
const known = (value) => value !== null && value !== undefined;
const number = (value) => known(value) ? Number(value.toPrecision(3)).toLocaleString("en") : "";
const exact = (value) => known(value) ? (Math.abs(value) >= 1e-3 && Math.abs(value) < 1e6 || value === 0
  ? String(Number(value.toPrecision(5))) : value.toExponential(2)) : "";
const gib = (bytes) => known(bytes) ? `${(bytes / 2 ** 30).toFixed(bytes < 2 ** 30 ? 2 : 1)} GiB` : "";
function span(seconds) {
  if (!known(seconds)) return "";
  if (seconds < 1) return `${number(1e3 * seconds)} ms`;
  if (seconds < 90) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  const minutes = Math.round(seconds / 60), hours = Math.floor(minutes / 60), days = Math.floor(hours / 24);
  if (days) return `${days} d ${hours % 24} h`;
  return hours ? `${hours} h ${minutes % 60} min` : `${minutes} min`;
}
const color = (run) => COLORS[runs.indexOf(run) % COLORS.length];
const sizes = (layout) => Object.entries(layout).filter(([, size]) => size > 1).map(([name, size]) => `${name} ${size}`).join(" x ");

// Is it healthy, when will it end?

function fact(name, value) {
  return value === "" ? null : make("div", { className: "fact" }, make("span", { textContent: name }), make("b", { textContent: value }));
}
function card(run) {
  const s = run.status;
  const box = make("input", { type: "checkbox", checked: !hidden.has(s.run), title: "show its curves" });
  box.onchange = () => { box.checked ? hidden.delete(s.run) : hidden.add(s.run); drawCharts(); };
  const done = s.steps ? Math.min(1, s.step / s.steps) : 0;
  const troubles = [];
  if (s.state === "stands still" || s.state === "gone") troubles.push(`no step for ${span(s.silent_seconds)}`);
  if (s.fault && s.state === "failed") troubles.push(`failed: ${s.fault}`);
  if (s.slow_ranks.length) troubles.push(`slow: rank ${s.slow_ranks.join(", ")}`);
  if (run.error) troubles.push(run.error);
  const start = run.events.filter((event) => event.event === "start").pop() || {};
  const layout = [known(start.world) ? `${start.world} rank${start.world === 1 ? "" : "s"}` : "",
    typeof start.layout === "object" && start.layout ? sizes(start.layout) : ""].filter((text) => text).join(" = ");
  return make("div", { className: "card run" },
    make("div", { className: "name" }, runs.length > 1 ? box : null,
      make("i", { className: "swatch", style: { background: color(run) } }), make("span", { textContent: run.name, title: s.run }),
      make("span", { className: `pill ${STATES[s.state] || "idle"}`, textContent: s.state })),
    make("div", { className: "facts" },
      fact("step", s.steps ? `${s.step.toLocaleString("en")} / ${s.steps.toLocaleString("en")}` : String(s.step)),
      fact("left", span(s.seconds_left)), fact("loss", known(s.loss) ? s.loss.toFixed(4) : ""),
      fact("held-out loss", known(s.validation_loss) ? s.validation_loss.toFixed(4) : ""),
      fact("tokens/s", number(s.tokens_per_second)), fact("step time", span(s.step_seconds)),
      fact("MFU", known(s.mfu) ? `${(100 * s.mfu).toFixed(1)} %` : ""), fact("memory", gib(s.peak_memory_bytes)),
      fact("goodput", known(run.goodput) ? `${(100 * run.goodput).toFixed(1)} %` : ""),
      fact("restarts", s.restarts ? String(s.restarts) : ""), fact("saved", known(s.saved_step) ? `step ${s.saved_step}` : "")),
    make("div", { className: "bar" }, make("i", { style: { width: `${100 * done}%`, background: color(run) } })),
    layout ? make("div", { className: "layout dim", textContent: layout }) : null,
    s.fault && s.state !== "failed" ? make("div", { className: "trouble past", textContent: `last fault: ${s.fault}` }) : null,
    ...troubles.map((text) => make("div", { className: "trouble", textContent: text })));
}

// Charts

function smoothed(values, weight) {
  let mean = null;
  return values.map((value) => {
    if (!known(value)) return value;
    mean = mean === null ? value : weight * mean + (1 - weight) * value;
    return mean;
  });
}
function chartsOf(shown) {
  const left = new Set(shown.flatMap((run) => Object.keys(run.curves)));
  const charts = CHARTS.map((chart) => {
    const names = [...left].filter((name) => chart.names.some((pattern) => pattern.test(name)));
    names.forEach((name) => left.delete(name));
    return { ...chart, found: names };
  });
  for (const name of [...left].sort()) charts.push({ title: name.replaceAll("_", " "), found: [name] });
  const wanted = get("filter").value.trim().toLowerCase();
  return charts.filter((chart) => chart.found.length
    && (!wanted || [chart.title, ...chart.found].some((name) => name.toLowerCase().includes(wanted))));
}
function seriesOf(chart, shown) {
  const weight = chart.smooth ? Number(get("smooth").value) : 0;
  const series = [], tables = [];
  for (const run of shown) for (const [position, name] of chart.found.filter((name) => run.curves[name]).entries()) {
    const [steps, raw] = run.curves[name];
    const values = chart.scale ? raw.map((value) => known(value) ? value * chart.scale : null) : raw;
    const sparse = /^(validation|test)_/.test(name);
    const label = (shown.length > 1 ? `${run.name} ` : "") + (chart.found.length > 1 ? name : shown.length > 1 ? "" : name);
    const stroke = runs.length > 1 ? color(run) : COLORS[position % COLORS.length];
    const style = { stroke, width: 1.5, spanGaps: true, points: { show: sparse || values.length < 2, size: 6 }, value: (_, v) => exact(v) };
    if (runs.length > 1 && position) style.dash = [6, 3];
    if (weight && !sparse) {
      series.push({ ...style, label: `${label} (each)`, stroke: `${stroke}40`, width: 1 });
      tables.push([steps, values]);
    }
    series.push({ ...style, label });
    tables.push([steps, weight && !sparse ? smoothed(values, weight) : values]);
  }
  return [series, tables];
}
// Steps whose number is NaN or infinite: they leave a gap in the curve, and that is what a reader looks for.
function notFinite(chart, shown) {
  const steps = [...new Set(shown.flatMap((run) => chart.found.filter((name) => run.curves[name]).flatMap((name) =>
    run.curves[name][0].filter((_, index) => !known(run.curves[name][1][index])))))].sort((a, b) => a - b);
  return steps.length ? `not finite in step ${steps.slice(0, 3).join(", ")}${steps.length > 3 ? " and others" : ""}` : "";
}
function markers(shown) {
  return (u) => {
    for (const run of shown) for (const event of run.events) {
      if (!(event.event in MARKED) || !Number.isFinite(event.step)) continue;
      const x = u.valToPos(event.step, "x", true);
      if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) continue;
      u.ctx.save();
      u.ctx.strokeStyle = MARKED[event.event];
      u.ctx.setLineDash([4, 4]);
      u.ctx.beginPath();
      u.ctx.moveTo(x, u.bbox.top);
      u.ctx.lineTo(x, u.bbox.top + u.bbox.height);
      u.ctx.stroke();
      u.ctx.restore();
    }
  };
}
function zoom(to) {
  range = to;
  get("reset").hidden = to === null;
  if (live) poll(); else drawCharts();
}
function drawCharts() {
  const shown = runs.filter((run) => !hidden.has(run.status.run));
  const place = get("charts");
  const charts = chartsOf(shown);
  drawn.forEach((plot) => plot.destroy());
  drawn = [];
  place.replaceChildren();
  const axis = { stroke: css("--dim"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line") } };
  for (const chart of charts) {
    const [series, tables] = seriesOf(chart, shown);
    const area = make("div");
    place.append(make("div", { className: "card chart" }, make("h2", {}, chart.title, " ",
      make("span", { className: "dim", textContent: chart.unit || "" }), " ",
      make("span", { className: "lost", textContent: notFinite(chart, shown) })), area));
    const isLog = chart.log && get("log").checked;
    const options = {
      width: area.clientWidth, height: 230, series: [{ label: "step" }, ...series],
      scales: { x: { time: false, range: (_, low, high) => range || [low, high === low ? low + 1 : high] }, y: { distr: isLog ? 3 : 1 } },
      axes: [{ ...axis, size: 34, values: (_, ticks) => ticks.map((tick) => Number.isInteger(tick) ? tick.toLocaleString("en") : "") },
        { ...axis, size: 64, values: (_, ticks) => ticks.map(exact) }],
      cursor: { sync: { key: "step" }, drag: { x: true, y: false, setScale: false }, bind: { dblclick: () => () => zoom(null) } },
      hooks: {
        draw: [markers(shown)],
        setSelect: [(u) => {
          if (u.select.width < 4) return;
          const to = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
          setTimeout(() => zoom(to));
        }],
      },
      legend: { live: true },
    };
    drawn.push(new uPlot(options, uPlot.join(tables), area));
  }
}

// Where did the time go, what is slow?

function stack(parts, unit) {
  const whole = Object.values(parts).reduce((sum, part) => sum + part, 0) || 1;
  const shown = Object.entries(parts).filter(([, part]) => part > 0);
  const hue = (name) => PARTS[name] || AXES;
  return [
    make("div", { className: "stack" }, ...shown.map(([name, part]) => make("i",
      { title: `${name} ${unit(part)}`, style: { width: `${100 * part / whole}%`, background: hue(name) } }))),
    make("div", { className: "key" }, ...shown.map(([name, part]) => make("span", {},
      make("i", { className: "swatch", style: { background: hue(name) } }), `${name} ${(100 * part / whole).toFixed(1)} % (${unit(part)})`)))];
}
function section(title, ...children) {
  return make("div", { className: "card" }, make("h2", { textContent: title }), ...children);
}
function table(headings, rows, kind = "") {
  return make("div", { className: "scroll" }, make("table", { className: kind },
    make("tr", {}, ...headings.map((heading) => make("th", { textContent: heading }))),
    ...rows.map((row) => make("tr", {}, ...row.map((cell) =>
      make("td", cell instanceof Node ? {} : { textContent: known(cell) ? String(cell) : "" }, cell instanceof Node ? cell : null))))));
}
function meter(share, fill) {
  return make("div", { className: "bar", style: { width: "90px" } }, make("i", { style: { width: `${100 * Math.min(1, share)}%`, background: fill } }));
}
function ranksTable(run, detail) {
  const seconds = run.ranks.compute_seconds || [], peak = run.ranks.peak_memory_bytes || detail.peak_memory_bytes || [];
  const rows = Math.max(seconds.length, peak.length, detail.ranks.length);
  if (!rows) return null;
  const largest = Math.max(...peak.filter(known), 1), slowest = Math.max(...seconds.filter(known), 1e-9);
  return section("ranks", table(["rank", "host", "device", "peak memory", "", "micro-batch, without waits", ""],
    [...Array(rows).keys()].map((rank) => {
      const of = detail.ranks[rank] || {};
      return [rank, of.host, of.device, gib(peak[rank]), known(peak[rank]) ? meter(peak[rank] / largest, COLORS[2]) : "",
        known(seconds[rank]) ? `${(1e3 * seconds[rank]).toFixed(1)} ms` : "", known(seconds[rank]) ? meter(seconds[rank] / slowest, COLORS[0]) : ""];
    }), "short"));
}
function eventsTable(run) {
  const rows = [...run.events].reverse().map(({ time, event, ...rest }) => [
    new Date(1000 * time).toLocaleString(), event,
    Object.entries(rest).filter(([name, value]) => known(value) && value !== "" && name !== "job").map(([name, value]) =>
      `${name} ${name === "layout" && typeof value === "object" ? sizes(value) || "of one rank"
        : typeof value === "object" ? JSON.stringify(value) : value}`).join(", ")]);
  return section("starts, checkpoints, faults", table(["time", "event", ""], rows, "short2"));
}
function drawDetails() {
  const place = get("details");
  const position = Math.max(0, runs.findIndex((run) => !hidden.has(run.status.run)));
  const run = runs[position], detail = details[position];
  if (!run || !detail) return;
  const kept = [...place.querySelectorAll(".scroll")].map((node) => node.scrollTop);
  const children = [section(`where the time went${runs.length > 1 ? `: ${run.name}` : ""}`,
    make("div", { className: "dim", textContent: `${span(run.status.wall_seconds)} since the first start. Goodput is the part of the steps.` }),
    ...stack(run.status.seconds, span))];
  if (detail.profile) children.push(section("recorded steps, by rank", make("div", { className: "scroll" },
    ...detail.profile.map((of) => make("div", {}, make("span", { className: "dim", textContent: `rank ${of.rank}` }),
      ...stack({ ...of.parts, ...of.exposed }, (seconds) => `${(1e3 * seconds).toFixed(1)} ms`))))));
  children.push(ranksTable(run, detail), eventsTable(run));
  if (detail.timeline) {
    const picture = make("img", { src: `data:image/svg+xml;base64,${detail.timeline}`, alt: "timeline of the pipeline" });
    const timeline = section("pipeline in the last recorded step", picture);
    timeline.classList.add("wide");
    children.push(timeline);
  }
  children.push(section("environment", table(["", ""], Object.entries(detail.environment).map(([name, value]) =>
    [name, typeof value === "object" ? JSON.stringify(value) : value]), "pairs")),
    section("config.toml", make("div", { className: "scroll" }, make("pre", { textContent: detail.config }))));
  place.replaceChildren(...children.filter(known));
  place.querySelectorAll(".scroll").forEach((node, index) => { node.scrollTop = kept[index] || 0; });
}
function draw() {
  const marked = [...new Set(runs.flatMap((run) => run.events.map((event) => event.event)))].filter((name) => name in MARKED);
  get("marked").textContent = marked.length ? `Dashed lines: ${marked.join(", ")}.` : "";
  get("runs").replaceChildren(...runs.map(card));
  drawCharts();
  drawDetails();
}

// The dashboard asks again and again.

let asking = false;
async function poll() {
  if (asking) return;
  asking = true;
  try {
    const asked = range && range.map(Math.round).join("-");
    const answer = await fetch(`data?points=${POINTS}${asked ? `&steps=${asked}` : ""}`);
    if (!answer.ok) throw new Error(await answer.text());
    ({ runs, details } = await answer.json());
    get("news").textContent = "";
    if (!drawn.some((plot) => plot.cursor.left > 0)) draw();  // not under somebody's mouse
    else get("runs").replaceChildren(...runs.map(card));
  } catch (error) {
    get("news").textContent = `not up to date: ${error.message}`;
  } finally {
    asking = false;
  }
}
get("filter").oninput = drawCharts;
get("smooth").oninput = drawCharts;
get("log").onchange = drawCharts;
get("reset").onclick = () => zoom(null);
addEventListener("resize", drawCharts);
draw();
if (live) setInterval(poll, POLL_MS);
