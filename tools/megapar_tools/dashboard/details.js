// Tables beside the charts: what differs between runs, the load of experts, where the time went, events, options.

const sum = (parts) => Object.values(parts).reduce((total, part) => total + part, 0) || 1;
const positive = (parts) => Object.entries(parts).filter(([, part]) => part > 0);
function stack(parts, unit, whole = sum(parts)) {
  return make("div", { className: "stack" }, ...positive(parts).map(([name, part]) => make("i",
    { title: `${PART_WORDS[name] || name} ${unit(part)}`, style: { width: `${100 * part / whole}%`, background: ofPart(name) } })));
}
function keyOfParts(parts, unit) {
  return make("div", { className: "key" }, ...positive(parts).map(([name, part]) => make("span", {},
    make("i", { className: "swatch", style: { background: ofPart(name) } }),
    `${PART_WORDS[name] || name} ${(100 * part / sum(parts)).toFixed(1)} % (${unit(part)})`)));
}
function recordedSteps(ranks) {
  const unit = (seconds) => `${(1e3 * seconds).toFixed(1)} ms`, mean = {};
  const all = ranks.map(({ parts, exposed }) => ({ ...parts, ...exposed }));
  for (const parts of all) for (const [name, part] of Object.entries(parts)) mean[name] = (mean[name] || 0) + part / ranks.length;
  const longest = Math.max(...all.map(sum));
  return section("recorded steps, by rank", make("div", { className: "scroll rows" }, ...all.flatMap((parts, index) =>
    [make("span", { className: "dim", textContent: `rank ${ranks[index].rank}` }), stack(parts, unit, longest)])),
  make("div", { className: "dim", textContent: "Mean of the ranks. An axis, such as tp, has the exchanges that nothing hid." }),
  keyOfParts(mean, unit));
}
function section(title, ...children) {
  return make("div", { className: "card" }, make("h2", { textContent: title }), ...children);
}
function folded(title, name, ...children) {
  const box = make("details", { className: "card", open: opened.has(name) }, make("summary", {}, make("b", { textContent: title })), ...children);
  box.ontoggle = () => { box.open ? opened.add(name) : opened.delete(name); };
  return box;
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

// What differs between the runs that are shown.

function factsOf(run) {
  const { environment = {}, options = {} } = details[runs.indexOf(run)] || {};
  const text = (value) => typeof value === "string" ? value : "";
  const versions = typeof environment.versions === "object" && environment.versions || {};
  const values = Object.fromEntries(Object.entries(options).map(([path, [value]]) => [path, value]));
  const facts = { "(commit)": text(environment.commit), "(hardware)": text(environment.hardware), "(torch)": text(versions.torch) };
  return Object.assign(bare(facts), values);
}
function drawDifferences() {
  const shown = shownRuns(), facts = shown.map(factsOf);
  const paths = [...new Set(facts.flatMap(Object.keys))].filter((path) => path !== "run_dir");
  const rows = paths.map((path) => [path, ...facts.map((fact) => known(fact[path]) ? fact[path] : "–")])
    .filter(([, ...values]) => new Set(values).size > 1);
  get("differences").replaceChildren(...shown.length > 1 ? [section("what differs",
    rows.length ? table(["option", ...shown.map((run) => run.name)], rows, "pairs")
      : make("div", { className: "dim", textContent: "All options, the commit and the hardware of these runs are the same." }))] : []);
}

// Heat maps of experts: an even load has the color of the card, the scale is that of load.png.

const MOST_LOAD = 3;
function rgb(name) {
  const hex = css(name).slice(1), wide = hex.length === 3 ? [...hex].map((digit) => digit + digit).join("") : hex;
  return [0, 2, 4].map((at) => parseInt(wide.slice(at, at + 2), 16));
}
function heatColors() {
  const [even, more, less] = ["--card", "--bad", "--less"].map(rgb);
  return (load) => {
    if (!known(load)) return "transparent";
    const share = load > 1 ? Math.min(1, (load - 1) / (MOST_LOAD - 1)) : 1 - load, to = load > 1 ? more : less;
    return `rgb(${even.map((part, index) => Math.round(part + (to[index] - part) * share))})`;
  };
}
function heat(title, { layers, loads }, names, word) {
  const colorOf = heatColors(), columns = Math.max(1, names.length), height = Math.max(4, Math.min(26, Math.floor(320 / layers.length)));
  const canvas = make("canvas", { width: columns, height: layers.length, style: { height: `${height * layers.length}px` } });
  const note = make("div", { className: "dim", textContent: "\u00a0" }), context = canvas.getContext("2d");
  loads.forEach((row, y) => row.forEach((load, x) => { context.fillStyle = colorOf(load); context.fillRect(x, y, 1, 1); }));
  canvas.onmousemove = ({ offsetX, offsetY }) => {
    const x = Math.min(columns - 1, Math.floor(offsetX / canvas.clientWidth * columns));
    const y = Math.min(layers.length - 1, Math.floor(offsetY / canvas.clientHeight * layers.length));
    note.textContent = `layer ${layers[y]}, ${word} ${names[x]}: ${exact(loads[y][x])} times the mean`;
  };
  const every = Math.ceil(layers.length * 14 / (height * layers.length));
  const left = make("div", { className: "layers dim" }, ...layers.map((layer, index) =>
    make("span", { style: { height: `${height}px` }, textContent: index % every ? "" : layer })));
  return make("div", { className: "heat" }, make("div", { className: "dim", textContent: title }),
    make("div", { className: "map" }, left, canvas),
    make("div", { className: "ends dim" }, make("span", { textContent: `${word} ${names[0] ?? ""}` }),
      make("span", { textContent: `${names.at(-1) ?? ""}` })), note);
}
function drawExperts() {
  const mixtures = shownRuns().filter((run) => known(run.experts.fullest) && run.experts.fullest.layers);
  const colorOf = heatColors();
  const scale = () => make("span", { className: "scale dim" }, "0", ...[0, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3].map((load) =>
    make("i", { style: { background: colorOf(load) } })), `${MOST_LOAD} and more times the mean; an even load has the color of the card`);
  get("experts").replaceChildren(...mixtures.map((run) => {
    const { fullest, newest } = run.experts, counted = newest && newest.layers;
    return section(`load of the experts${runs.length > 1 ? `: ${run.name}` : ""}`, scale(), make("div", { className: "two" },
      heat("fullest expert of each layer (rows), by step", fullest, fullest.steps, "step"),
      counted ? heat(`each expert of each layer (rows), step ${newest.step}`, newest, newest.loads[0].map((_, index) => index), "expert") : null));
  }));
}

// One run: time, ranks, events, options.

function ranksTable(run, detail) {
  const seconds = run.ranks.compute_seconds || [], peak = run.ranks.peak_memory_bytes || [];
  const bytes = peak.length ? peak : detail.peak_memory_bytes;
  const rows = Math.max(seconds.length, bytes.length, detail.ranks.length);
  if (!rows) return null;
  const largest = Math.max(...bytes.filter(known), 1), slowest = Math.max(...seconds.filter(known), 1e-9);
  return section("ranks", table(["rank", "host", "device", "peak memory", "", "micro-batch, without waits", ""],
    [...Array(rows).keys()].map((rank) => {
      const of = detail.ranks[rank] || {};
      return [rank, of.host, of.device, gib(bytes[rank]), known(bytes[rank]) ? meter(bytes[rank] / largest, COLORS[2]) : "",
        known(seconds[rank]) ? `${(1e3 * seconds[rank]).toFixed(1)} ms` : "", known(seconds[rank]) ? meter(seconds[rank] / slowest, COLORS[0]) : ""];
    }), "short"));
}
// The picture is drawn for a light page.
const dark = matchMedia("(prefers-color-scheme: dark)");
function pictureOf(base64) {
  if (!dark.matches) return `data:image/svg+xml;base64,${base64}`;
  const shades = [...given.shades, ["#ffffff", css("--card")], ["#000000", css("--text")]];
  const svg = shades.reduce((text, [light, of]) => text.replaceAll(light, of), atob(base64)).replace("<svg ", `<svg fill="${css("--text")}" `);
  return `data:image/svg+xml;base64,${btoa(svg)}`;
}
function optionTables(detail) {
  const all = Object.entries(detail.options), chosen = all.filter(([, [, source]]) => source !== "default");
  const rows = (some) => some.map(([path, [value, source]]) => [path, value, source]);
  return [section("options that were set", table(["option", "value", "from"], rows(chosen), "pairs from")),
    folded(`all ${all.length} options, and where each came from`, "options", table(["option", "value", "from"], rows(all), "pairs from"))];
}
function drawDetails() {
  const shown = shownRuns(), run = shown.find((one) => one.status.run === detailed) || shown[0], detail = details[runs.indexOf(run)];
  if (!run || !detail) return get("details").replaceChildren();
  const kept = [...get("details").querySelectorAll(".scroll")].map((node) => node.scrollTop);
  const children = [];
  if (shown.length > 1) {
    const pick = make("select", { ariaLabel: "run" }, ...shown.map((one) =>
      make("option", { textContent: one.name, value: one.status.run, selected: one === run })));
    pick.onchange = () => { detailed = pick.value; drawDetails(); };
    children.push(make("div", { className: "wide" }, "One run: ", pick));
  }
  children.push(section("where the time went",
    make("div", { className: "dim", textContent: `${span(run.status.wall_seconds)} since the first start. Goodput is the part of the steps.` }),
    stack(run.status.seconds, span), keyOfParts(run.status.seconds, span)));
  if (detail.profile) children.push(recordedSteps(detail.profile));
  const events = [...run.events].reverse().map(({ time, text }) => [moment(time), text]);
  children.push(ranksTable(run, detail), section("starts, checkpoints, faults", table(["time", "what happened"], events, "pairs")));
  if (detail.timeline) {
    const picture = make("img", { src: pictureOf(detail.timeline), alt: "timeline of the pipeline" });
    const timeline = section("pipeline in the last recorded step", picture);
    timeline.classList.add("wide");
    children.push(timeline);
  }
  if (Object.keys(detail.options).length) children.push(...optionTables(detail));
  children.push(folded("environment", "environment", table(["", ""], Object.entries(detail.environment).map(([name, value]) =>
    [name, typeof value === "object" ? JSON.stringify(value) : value]), "pairs")));
  children.push(make("div", { className: "wide" }, make("button", { textContent: "all numbers of this run as CSV",
    onclick: () => download(`${run.name} metrics`, Object.keys(run.curves), [run]) })));
  get("details").replaceChildren(...children.filter(known));
  get("details").querySelectorAll(".scroll").forEach((node, index) => { node.scrollTop = kept[index] || 0; });
}
