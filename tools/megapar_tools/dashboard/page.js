// The page of runs: report.html has its data in it, the dashboard asks for it every few seconds.
// Text out of a run folder is only ever set as textContent.
const POLL_MS = 2000, POINTS = 1200;
const STATES = { "at work": "good", starts: "good", done: "good", "stands still": "bad", failed: "bad", gone: "bad", stopped: "warn" };

// Is it healthy, when will it end?

function fact(name, value, title = "") {
  return value === "" ? null : make("div", { className: "fact", title }, make("span", { textContent: name }), make("b", { textContent: value }));
}
function circumstances(run) {
  const start = run.events.filter((event) => event.event === "start").pop() || {};
  const layout = [known(start.world) ? `${start.world} rank${start.world === 1 ? "" : "s"}` : "",
    typeof start.layout === "object" && start.layout ? sizes(start.layout) : ""].filter((text) => text).join(" = ");
  const first = run.events.find((event) => event.event === "start"), { environment = {} } = details[runs.indexOf(run)] || {};
  const text = (value) => typeof value === "string" ? value : "";
  const { speed_steps: speed, saved_step: step } = run.status;
  return [layout, text(environment.hardware), text(environment.commit) && `commit ${text(environment.commit)}`,
    first ? `started ${moment(first.time)}` : "", known(step) ? `saved at step ${step}` : "",
    speed ? `speed: median of steps ${speed[0]} to ${speed[1]}` : ""].filter((part) => part).join(" · ");
}
function card(run) {
  const s = run.status;
  const box = make("input", { type: "checkbox", checked: !hidden.has(s.run), title: "show its curves" });
  box.onchange = () => { box.checked ? hidden.delete(s.run) : hidden.add(s.run); draw(); };
  const done = s.steps ? Math.min(1, s.step / s.steps) : 0;
  const troubles = [];
  if (s.state === "stands still" || s.state === "gone") troubles.push(`no step for ${span(s.silent_seconds)}`);
  if (s.fault && s.state === "failed") troubles.push(`failed: ${s.fault}`);
  if (s.failed_saves) troubles.push(`${s.failed_saves} save${s.failed_saves === 1 ? "" : "s"} failed since the newest in the run folder`);
  if (s.slow_ranks.length) troubles.push(`slow: rank ${s.slow_ranks.join(", ")}`);
  if (run.error) troubles.push(run.error);
  return make("div", { className: "card run" },
    make("div", { className: "name" }, runs.length > 1 ? box : null,
      make("i", { className: "swatch", style: { background: color(run) } }), make("span", { textContent: run.name, title: s.run }),
      make("span", { className: `pill ${STATES[s.state] || "idle"}`, textContent: s.state })),
    make("div", { className: "facts" },
      fact("step", s.steps ? `${s.step.toLocaleString("en")} / ${s.steps.toLocaleString("en")}` : String(s.step)),
      fact("left", span(s.seconds_left)), fact("loss", known(s.loss) ? s.loss.toFixed(4) : ""),
      fact("held-out loss", known(s.validation_loss) ? s.validation_loss.toFixed(4) : ""),
      fact("tokens/s", known(s.tokens_per_second) ? exact(Math.round(s.tokens_per_second)) : ""), fact("step time", span(s.step_seconds)),
      fact("MFU", known(s.mfu) ? `${(100 * s.mfu).toFixed(1)} %` : ""), fact("memory", gib(s.peak_memory_bytes)),
      fact("goodput", known(run.goodput) ? `${(100 * run.goodput).toFixed(1)} %` : ""),
      fact("restarts", s.restarts ? String(s.restarts) : "")),
    make("div", { className: "bar" }, make("i", { style: { width: `${100 * done}%`, background: color(run) } })),
    make("div", { className: "layout dim", textContent: circumstances(run) }),
    s.fault && s.state !== "failed" ? make("div", { className: "trouble past", textContent: `last fault: ${s.fault}` }) : null,
    ...troubles.map((text) => make("div", { className: "trouble", textContent: text })));
}
function drawCards() {
  get("runs").replaceChildren(...runs.map(card));
}
function zoom(to) {
  range = to;
  get("reset").hidden = to === null;
  if (live) poll(); else drawCharts();
}
function draw() {
  const marked = [...new Set(runs.flatMap((run) => run.events.map((event) => event.event)))].filter((name) => Object.hasOwn(MARKED, name));
  get("marked").textContent = marked.length ? `Dashed lines: ${marked.join(", ")}.` : "";
  drawCards();
  drawDifferences();
  drawCharts();
  drawExperts();
  drawDetails();
}

// The dashboard asks again and again.

let asking = false;
async function ask(points) {
  const asked = range && stepsIn(range).map((step) => Math.max(0, Math.round(step))).join("-");
  const answer = await fetch(`data?points=${points}${asked ? `&steps=${asked}` : ""}`);
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}
async function poll() {
  if (asking) return;
  asking = true;
  try {
    take(await ask(POINTS));
    get("news").textContent = "";
    // Not under somebody's mouse, in a text that is being marked, or under an open menu.
    const busy = document.querySelector(".u-over:hover, .map canvas:hover") || String(getSelection())
      || document.activeElement instanceof HTMLSelectElement;
    if (!busy) draw();
    else drawCards();
  } catch (error) {
    get("news").textContent = `not up to date: ${error.message}`;
  } finally {
    asking = false;
  }
}
get("filter").oninput = drawCharts;
for (const [name, property] of [["x", "value"], ["smooth", "value"], ["log", "checked"]]) {
  if (name in saved) get(name)[property] = saved[name];
  get(name)[property === "checked" || name === "x" ? "onchange" : "oninput"] = () => {
    if (name === "x") range = null;
    get("reset").hidden = range === null;
    saved[name] = get(name)[property];
    keep();
    drawCharts();
  };
}
get("reset").onclick = () => zoom(null);
addEventListener("resize", drawCharts);
dark.addEventListener("change", draw);
draw();
if (live) setInterval(poll, POLL_MS);
