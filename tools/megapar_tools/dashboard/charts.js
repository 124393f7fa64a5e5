// Charts of curves: what they are called, which are folded away, and what can be done with each.
// Names of metrics.jsonl; a name that is in no chart here gets one of its own. `main` charts are shown also while they
// are constant, `quiet` ones tell what another chart tells. `steady`: changes below 1 % count as none.
// Of several runs only the curve `total` is drawn; `axes` have the colors of the axes.
const CHARTS = [
  { title: "loss", unit: "nats per token", names: [/^loss$/, /^validation_loss/, /^test_loss/], smooth: true, log: true, main: true },
  { title: "gradient norm", names: [/^grad_norm$/], smooth: true, main: true },
  { title: "tokens a second", unit: "all ranks", names: [/^tokens_per_second$/], smooth: true, main: true },
  { title: "time of a step", unit: "s", names: [/^step_seconds$/, /^data_seconds$/], total: "step_seconds", smooth: true, main: true },
  { title: "MFU", unit: "%", names: [/^mfu$/], scale: 100, smooth: true },
  { title: "learning rate", names: [/^lr$/] },
  { title: "peak memory of rank 0", unit: "GiB", names: [/^peak_memory_bytes$/], scale: 1 / 2 ** 30, steady: true },
  { title: "bytes sent by rank 0 in a step", unit: "MiB", names: [/^comm_bytes\//], total: "comm_bytes", axes: true,
    scale: 1 / 2 ** 20, steady: true },
  { title: "fullest expert", unit: "÷ mean of its layer", names: [/^expert_load_max$/] },
  { title: "added losses", unit: "nats per token", names: [/^losses\//], smooth: true },
  { title: "target tokens of a step", names: [/^tokens$/] },
  { title: "samples so far", names: [/^consumed_samples$/], quiet: true },
  { title: "TFLOP/s of a device", names: [/^tflops_per_device$/], smooth: true, quiet: true },
];
const MARKED = { fault: "#c0262d", spike: "#a04bd1", straggler: "#c2a000", stall: "#c0262d" };
const DASHES = [[], [6, 3], [2, 3], [10, 3, 2, 3]];
const TIMES = [[172800, 86400, "days"], [7200, 3600, "hours"], [300, 60, "minutes"], [0, 1, "seconds"]];
const MOST_POINTS = 20000;

// The x axis: steps, or sums over the steps of a run.

const shownRuns = () => runs.filter((run) => !hidden.has(run.status.run));
let unitOfAll = TIMES.at(-1);
function timeUnit() {
  if (range) return unitOfAll;  // a dashboard has sums of the chosen steps alone, and the range is in this unit
  const longest = Math.max(0, ...shownRuns().map((run) => run.sums.step_seconds ? run.sums.step_seconds[1].at(-1) || 0 : 0));
  return unitOfAll = TIMES.find(([from]) => longest >= from);
}
function between(from, to, value) {
  if (!from.length) return null;
  let low = 0, high = from.length - 1;
  while (low < high) { const middle = (low + high) >> 1; if (from[middle] < value) low = middle + 1; else high = middle; }
  if (!low || from[low] <= value) return to[low];
  return to[low - 1] + (to[low] - to[low - 1]) * (value - from[low - 1]) / (from[low] - from[low - 1]);
}
function place(run, step) {
  if (saved.x === "steps") return step;
  const [steps, sums] = run.sums[saved.x === "tokens" ? "tokens" : "step_seconds"] || [[], []];
  const found = between(steps, sums, step);
  return found === null ? null : saved.x === "tokens" ? found : found / timeUnit()[1];
}
function stepsIn(range) {
  if (saved.x === "steps") return range;
  const scale = saved.x === "tokens" ? 1 : timeUnit()[1];
  const ends = shownRuns().map((run) => run.sums[saved.x === "tokens" ? "tokens" : "step_seconds"] || [[], []])
    .map(([steps, sums]) => range.map((end) => between(sums, steps, end * scale)));
  return [Math.min(...ends.map(([first]) => first)), Math.max(...ends.map(([, last]) => last))];
}

// Which charts there are.

function smoothed(values, weight) {
  let mean = null;
  return values.map((value) => {
    if (!known(value)) return value;
    mean = mean === null ? value : weight * mean + (1 - weight) * value;
    return mean;
  });
}
function curvesOf(chart, run) {
  const names = chart.found.filter((name) => run.curves[name]);
  if (!chart.total) return names;
  if (runs.length > 1 && run.curves[chart.total]) return [chart.total];
  return chart.axes ? names.filter((name) => name !== chart.total && run.curves[name][1].some((value) => value)) : names;
}
function constantOf(chart, shown) {
  const values = [];
  for (const run of shown) for (const name of curvesOf(chart, run)) {
    const found = run.curves[name][1].filter(known), low = Math.min(...found), high = Math.max(...found);
    if (found.length < run.curves[name][1].length || high - low > (chart.steady ? 0.01 * Math.abs(high) : 0)) return null;
    const who = [runs.length > 1 ? run.name : "", curvesOf(chart, run).length > 1 ? run.words[name] : ""].filter((part) => part).join(" ");
    values.push([who, `${exact(high * (chart.scale || 1))} ${chart.unit || ""}`.trim()]);
  }
  if (new Set(values.map(([, text]) => text)).size === 1) return values[0][1];
  return values.map(([who, text]) => `${who} ${text}`).join(", ");
}
function chartsOf(shown) {
  const left = new Set(shown.flatMap((run) => Object.keys(run.curves)));
  const words = Object.assign(bare({}), ...shown.map((run) => run.words));
  const charts = CHARTS.map((chart) => {
    const names = [...left].filter((name) => chart.names.some((pattern) => pattern.test(name)) || name === chart.total);
    names.forEach((name) => left.delete(name));
    return { ...chart, found: names };
  });
  for (const name of [...left].sort()) charts.push({ title: words[name], found: [name] });
  const wanted = get("filter").value.trim().toLowerCase();
  const matches = (chart) => !wanted || [chart.title, ...chart.found].some((name) => name.toLowerCase().includes(wanted));
  return charts.filter((chart) => chart.found.length && matches(chart))
    .map((chart) => {
      const constant = chart.main ? null : constantOf(chart, shown), chosen = saved.charts[chart.title];
      const why = chosen === "hide" ? "hidden" : known(constant) ? constant : chart.quiet ? "follows from other charts" : "";
      return { ...chart, pinned: chosen === "pin", folded: why && chosen !== "pin" && chosen !== "show" ? why : "" };
    }).sort((one, other) => other.pinned - one.pinned);
}

// One chart.

function seriesOf(chart, shown) {
  const weight = chart.smooth ? Number(get("smooth").value) : 0, series = [], tables = [];
  for (const run of shown) for (const [position, name] of curvesOf(chart, run).entries()) {
    const [steps, raw] = run.curves[name], several = curvesOf(chart, run).length > 1;
    const kept = steps.map((step, index) => [place(run, step), raw[index]]).filter(([x]) => x !== null);
    const xs = kept.map(([x]) => x), values = kept.map(([, value]) => known(value) ? value * (chart.scale || 1) : null);
    const sparse = /^(validation|test)_/.test(name);
    const label = runs.length > 1 ? run.name + (several ? `: ${run.words[name]}` : "") : run.words[name];
    const stroke = runs.length > 1 ? color(run) : chart.axes ? ofPart(name.split("/")[1] || "") : COLORS[position % COLORS.length];
    const style = { stroke, width: 1.5, spanGaps: true, points: { show: sparse || values.filter(known).length < 2, size: 6, fill: css("--card") } };
    if (runs.length > 1) style.dash = DASHES[position % DASHES.length];
    if (weight && !sparse) {
      series.push({ ...style, stroke: `${stroke}40`, width: 1 });
      tables.push([xs, values]);
    }
    series.push({ ...style, label });
    tables.push([xs, weight && !sparse ? smoothed(values, weight) : values]);
  }
  return [series, tables];
}
// Steps whose number is NaN or infinite: they leave a gap in the curve, and that is what a reader looks for.
function notFinite(chart, shown) {
  const steps = [...new Set(shown.flatMap((run) => curvesOf(chart, run).flatMap((name) =>
    run.curves[name][0].filter((_, index) => !known(run.curves[name][1][index])))))].sort((a, b) => a - b);
  return steps.length ? `not finite in step ${steps.slice(0, 3).join(", ")}${steps.length > 3 ? " and others" : ""}` : "";
}
function line(u, stroke, from, to) {
  u.ctx.save();
  u.ctx.strokeStyle = stroke;
  u.ctx.setLineDash([4, 4]);
  u.ctx.beginPath();
  u.ctx.moveTo(...from);
  u.ctx.lineTo(...to);
  u.ctx.stroke();
  u.ctx.restore();
}
function markers(shown) {
  return (u) => {
    const { left, top, width, height } = u.bbox;
    for (const run of shown) for (const event of run.events) {
      if (!Object.hasOwn(MARKED, event.event) || !Number.isFinite(event.step)) continue;
      const x = u.valToPos(place(run, event.step), "x", true);
      if (x >= left && x <= left + width) line(u, MARKED[event.event], [x, top], [x, top + height]);
    }
  };
}
// What a model without context reaches, if the run folder says so: a loss means something beside it.
function levels(shown) {
  const found = shown.map((run) => (details[runs.indexOf(run)] || {}).entropies || {}).find((some) => Object.keys(some).length) || {};
  return (u) => {
    const { left, top, width, height } = u.bbox;
    for (const [name, value] of Object.entries(found)) {
      const y = u.valToPos(value, "y", true);
      if (y < top || y > top + height) continue;
      line(u, css("--dim"), [left, y], [left + width, y]);
      u.ctx.save();
      u.ctx.fillStyle = css("--dim");
      u.ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
      u.ctx.textAlign = "right";
      u.ctx.strokeStyle = css("--card");
      u.ctx.lineWidth = 4 * devicePixelRatio;
      for (const draw of ["strokeText", "fillText"]) u.ctx[draw](`${name} entropy ${value.toFixed(2)}`, left + width - 4, y - 4 * devicePixelRatio);
      u.ctx.restore();
    }
  };
}
// Under a chart: each line's color and name, with its number under the mouse, else its last one.
function keyOf(series, tables) {
  const lines = series.map((one, index) => [one, tables[index]]).filter(([one]) => one.label);
  const numbers = lines.map(() => make("b"));
  const key = make("div", { className: "key" }, ...lines.map(([one], index) => make("span", {}, make("i", { className: "line",
    style: { borderTop: `2px ${one.dash && one.dash.length ? "dashed" : "solid"} ${one.stroke}` } }), one.label, numbers[index])));
  const update = (u) => {
    const over = u && known(u.cursor.idx) && u.cursor.left >= 0, x = over ? u.data[0][u.cursor.idx] : Infinity;
    lines.forEach(([, [xs, values]], index) => {
      let at = xs.length - 1;
      while (at > 0 && (xs[at] > x || !known(values[at]))) at -= 1;
      numbers[index].textContent = known(values[at]) ? exact(values[at]) : "";
    });
  };
  update(null);
  return [key, update];
}
function uplotOptions(chart, series, shown, area, update) {
  const axis = { stroke: css("--dim"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line") } };
  const short = (tick) => saved.x === "tokens" ? compact(tick) : Number.isInteger(tick) || saved.x !== "steps" ? tick.toLocaleString("en") : "";
  return {
    width: area.clientWidth, height: 220, series: [{ label: "x" }, ...series], legend: { show: false },
    scales: { x: { time: false, range: (_, low, high) => range || [low, high === low ? low + 1 : high] },
      y: { distr: chart.log && get("log").checked ? 3 : 1 } },
    axes: [{ ...axis, size: 34, values: (_, ticks) => ticks.map(short) }, { ...axis, size: 62, values: (_, ticks) => ticks.map(tickText) }],
    cursor: { sync: { key: "x" }, drag: { x: true, y: false, setScale: false }, bind: { dblclick: () => () => zoom(null) } },
    hooks: {
      draw: [markers(shown), ...(chart.log ? [levels(shown)] : [])],
      setCursor: [update],
      setSelect: [(u) => {
        if (u.select.width < 4) return;
        const to = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
        setTimeout(() => zoom(to));
      }],
    },
  };
}
function drawCharts() {
  const shown = shownRuns(), charts = chartsOf(shown);
  const unit = saved.x === "steps" ? "step" : saved.x === "tokens" ? "target tokens" : `${timeUnit()[2]} of steps`;
  drawn.forEach((plot) => plot.destroy());
  drawn = [];
  get("charts").replaceChildren();
  for (const chart of charts.filter(({ folded }) => !folded)) {
    const [series, tables] = seriesOf(chart, shown), [key, update] = keyOf(series, tables), area = make("div");
    const tool = (text, title, action) => make("button", { className: "tool", textContent: text, title, onclick: action });
    get("charts").append(make("div", { className: "card chart" },
      make("h2", {}, chart.title, make("span", { className: "dim", textContent: chart.unit || "" }),
        make("span", { className: "lost", textContent: notFinite(chart, shown) }),
        make("span", { className: "tools" },
          tool(chart.pinned ? "unpin" : "pin", "keep this chart in front", () => choose(chart.title, chart.pinned ? "show" : "pin")),
          tool("hide", "fold this chart away", () => choose(chart.title, "hide")),
          tool("csv", "download its numbers by step", () => download(chart.title, chart.found, shown)))),
      area, make("div", { className: "dim x", textContent: unit }), key));
    drawn.push(new uPlot(uplotOptions(chart, series, shown, area, update), tables.length ? uPlot.join(tables) : [[]], area));
  }
  drawFolded(charts.filter(({ folded }) => folded));
}
function drawFolded(charts) {
  const open = get("folded").querySelector("details[open]");
  get("folded").replaceChildren(...charts.length ? [make("details", { className: "card", open: Boolean(open) },
    make("summary", {}, make("b", { textContent: "folded away: " }), charts.map(({ title }) => title).join(", ")),
    table(["chart", "", ""], charts.map((chart) => [chart.title, chart.folded,
      make("button", { className: "tool", textContent: "show", onclick: () => choose(chart.title, "show") })])))] : []);
}
function choose(title, state) {
  saved.charts[title] = state;
  keep();
  drawCharts();
}

// Numbers as a file: of a chart's curves, or of all.

async function download(title, names, shown) {
  const wanted = new Set(shown.map((run) => run.status.run));
  const found = live ? bareRuns((await ask(MOST_POINTS)).runs).filter((run) => wanted.has(run.status.run)) : shown;
  const columns = found.flatMap((run) => names.filter((name) => run.curves[name])
    .map((name) => [found.length > 1 ? `${run.name} ${name}` : name, run.curves[name]]));
  const rows = new Map();
  columns.forEach(([, [steps, values]], index) => steps.forEach((step, at) => {
    if (!rows.has(step)) rows.set(step, Array(columns.length).fill(""));
    rows.get(step)[index] = known(values[at]) ? values[at] : "nan";
  }));
  // A spreadsheet would compute a cell that begins so.
  const cell = (text) => `"${String(text).replace(/^[=+\-@]/, "'$&").replaceAll('"', '""')}"`;
  const text = [["step", ...columns.map(([name]) => cell(name))], ...[...rows].sort(([a], [b]) => a - b).map(([step, row]) => [step, ...row])]
    .map((row) => row.join(",")).join("\n");
  const href = URL.createObjectURL(new Blob([`${text}\n`], { type: "text/csv" }));
  const link = make("a", { href, download: `${title.replace(/[^\w]+/g, "-")}.csv` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
