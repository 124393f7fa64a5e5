// What all parts of the page use: its data, what the browser remembers, elements, numbers and times in words.
"use strict";
const COLORS = ["#2f6fde", "#e0662f", "#1f9d6b", "#a04bd1", "#b08c00", "#d6336c", "#0e9aa7", "#7a6a53"];
const PART_WORDS = { W: "gradients of weights", slowest: "waiting for the slowest", idle: "idle: waiting for the pipeline" };

const given = JSON.parse(document.getElementById("data").textContent);
const live = given.live, hidden = new Set(), opened = new Set();
let runs, details, range = null, drawn = [], detailed = "";

// Without what every object has, such as `constructor`: names of metrics and options may be any text.
const bare = (object) => Object.assign(Object.create(null), object);
const bareRuns = (found) => found.map((run) => ({ ...run, curves: bare(run.curves), words: bare(run.words) }));
function take(data) {
  runs = bareRuns(data.runs);
  details = data.details;
}
take(given);

const STORE = "megapar page";
const saved = { x: "steps", charts: bare({}) };
try {
  const found = JSON.parse(localStorage.getItem(STORE));
  if (found) Object.assign(saved, found, { charts: bare(found.charts) });
} catch { /* a browser may forbid it, and then nothing is remembered */ }
function keep() {
  try { localStorage.setItem(STORE, JSON.stringify(saved)); } catch { /* as above */ }
}

const get = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const ofPart = (name) => css(`--of-${name.replaceAll(/[^\w]/g, "-")}`) || css("--of-axis");
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
const compact = (value) => new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 }).format(value);
const exact = (value) => known(value) ? (Math.abs(value) >= 1e-3 && Math.abs(value) < 1e9 || value === 0
  ? Number(value.toPrecision(Math.abs(value) < 1000 ? 5 : 12)).toLocaleString("en", { maximumFractionDigits: Math.abs(value) < 1000 ? 9 : 0 })
  : value.toExponential(2)) : "";
const tickText = (value) => Math.abs(value) < 1e4 ? exact(value) : Math.abs(value) < 1e15 ? compact(value) : value.toExponential(1).replace("+", "");
const gib = (bytes) => known(bytes) ? `${(bytes / 2 ** 30).toFixed(bytes < 2 ** 30 ? 2 : 1)} GiB` : "";
function span(seconds) {
  if (!known(seconds)) return "";
  if (seconds < 1) return `${number(1e3 * seconds)} ms`;
  if (seconds < 90) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  const minutes = Math.round(seconds / 60), hours = Math.floor(minutes / 60), days = Math.floor(hours / 24);
  if (days) return `${days} d ${hours % 24} h`;
  return hours ? `${hours} h ${minutes % 60} min` : `${minutes} min`;
}
// Of the reader's clock, such as 2026-11-29 13:45:52.
function moment(seconds) {
  const at = new Date(1000 * seconds), two = (value) => String(value).padStart(2, "0");
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}
const color = (run) => COLORS[runs.indexOf(run) % COLORS.length];
const sizes = (layout) => Object.entries(layout).filter(([, size]) => size > 1).map(([name, size]) => `${name} ${size}`).join(" x ");
