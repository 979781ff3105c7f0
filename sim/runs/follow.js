"use strict";
// Draws what /events tells of a run. All text goes through textContent: what a run's files hold is never markup.

const SVG = "http://www.w3.org/2000/svg";
const MOST_PLOTS = 8, MOST_POINTS = 6000;
const FIRST = ["loss", "accuracy"];
let rounds = [];
let lost = {}, sent = 0, accepted = 0;
let due = false;

const at = (id) => document.getElementById(id);

function make(tag, text, attributes = {}, space = null) {
  const node = space ? document.createElementNS(space, tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null && text !== undefined) node.textContent = text;
  return node;
}

function bytes(value) {
  if (value === null || value === undefined) return "n/a";
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let power = 0;
  while (Math.abs(value) >= 999.5 && power < units.length - 1) { value /= 1000; power += 1; }
  return `${Number(value.toPrecision(3))} ${units[power]}`;
}

function figure(value) {
  if (value === null || value === undefined) return "n/a";
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return value.toLocaleString("en");
  return String(Number(value.toPrecision(4)));
}

function ticks(low, high) {
  const raw = (high - low) / 5, ten = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * ten).find((s) => s >= raw) || raw;
  const out = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k += 1) out.push(k * step + 0);
  return out;
}

function plot(name, points) {
  const W = 460, H = 240, left = 58, right = 12, top = 10, bottom = 34;
  let [x0, x1] = [points[0][0], points[points.length - 1][0]];
  let [y0, y1] = [Infinity, -Infinity];
  for (const [, y] of points) { y0 = Math.min(y0, y); y1 = Math.max(y1, y); }
  if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
  const pad = (y1 - y0) * 0.05 || Math.abs(y0) * 0.05 || 0.5;
  y0 -= pad; y1 += pad;
  const px = (x) => left + (x - x0) / (x1 - x0) * (W - left - right);
  const py = (y) => H - bottom - (y - y0) / (y1 - y0) * (H - top - bottom);
  const last = points[points.length - 1];
  const svg = make("svg", null, { viewBox: `0 0 ${W} ${H}`, role: "img", class: "curve",
    "aria-label": `${name} over rounds; ${figure(last[1])} at round ${last[0]}` }, SVG);
  const add = (tag, text, attributes) => svg.appendChild(make(tag, text, attributes, SVG));
  for (const y of ticks(y0, y1)) {
    add("path", null, { class: "grid", d: `M${left} ${py(y)}H${W - right}` });
    add("text", figure(y), { x: left - 6, y: py(y) + 4, class: "end" });
  }
  for (const x of ticks(x0, x1)) {
    if (!Number.isInteger(x)) continue;
    add("path", null, { class: "grid", d: `M${px(x)} ${top}V${H - bottom}` });
    add("text", figure(x), { x: px(x), y: H - bottom + 16, class: "middle" });
  }
  add("text", "rounds", { x: (left + W - right) / 2, y: H - 2, class: "middle" });
  add("path", null, { class: "line", d: "M" + points.map(([x, y]) => `${px(x).toFixed(1)} ${py(y).toFixed(1)}`).join("L") });
  add("circle", null, { class: "end-point", cx: px(last[0]), cy: py(last[1]), r: 3.5 });
  const box = make("figure");
  box.append(svg, make("figcaption", `${name}: ${figure(last[1])} at round ${figure(last[0])}`));
  return box;
}

function table(target, caption, columns, rows) {
  const head = make("tr"), body = make("tbody");
  columns.forEach((name, i) => head.append(make("th", name, { scope: "col", ...(i ? { class: "number" } : {}) })));
  for (const row of rows) {
    const line = make("tr");
    row.forEach((cell, i) => line.append(i ? make("td", cell, { class: "number" }) : make("th", cell, { scope: "row" })));
    body.append(line);
  }
  const thead = make("thead");
  thead.append(head);
  target.replaceChildren(make("caption", caption), thead, body);
}

function draw() {
  due = false;
  const last = rounds[rounds.length - 1], before = rounds[rounds.length - 2];
  const tiles = at("tiles"), plots = at("plots");
  tiles.replaceChildren();
  plots.replaceChildren();
  for (const id of ["replies", "links"]) at(id).replaceChildren();
  if (!last) return;
  const tile = (name, value) => { const box = make("div"); box.append(make("dt", name), make("dd", value)); tiles.append(box); };
  tile("round", figure(last.round));
  if (last.iterations !== null) tile("local iterations", figure(last.iterations));
  if (last.sim_seconds) tile("simulated", `${figure(last.sim_seconds)} s`);
  if (last.wall_seconds !== null) tile("the last round took", `${figure(last.wall_seconds)} s`);
  if (last.payload_bytes !== null) tile("serialised so far", bytes(last.payload_bytes));
  if (last.sent) tile("answered, last round", `${figure(last.accepted)} of ${figure(last.sent)}`);

  const series = new Map();
  for (const one of rounds) {
    for (const [name, value] of Object.entries(one.metrics)) {
      if (value === null) continue;
      if (!series.has(name)) series.set(name, []);
      series.get(name).push([one.round, value]);
    }
  }
  const rank = (name) => (FIRST.indexOf(name) + FIRST.length + 1) % (FIRST.length + 1);
  const names = [...series.keys()].sort((a, b) => rank(a) - rank(b) || (a < b ? -1 : 1));
  for (const name of names.slice(0, MOST_PLOTS)) plots.append(plot(name, series.get(name)));
  if (names.length > MOST_PLOTS) plots.append(make("p", `And ${names.length - MOST_PLOTS} more: ${names.slice(MOST_PLOTS).join(", ")}`));
  if (!names.length) plots.append(make("p", "Nothing is measured yet."));

  const missing = (one) => Object.values(one.rejected).reduce((sum, count) => sum + (count || 0), 0);
  const reasons = [...new Set([...Object.keys(lost), ...Object.keys(last.rejected)])].sort();
  table(at("replies"), "Instructions and replies", ["", "last round", "all that this page saw"], [
    ["instructions sent", figure(last.sent), figure(sent)],
    ["replies taken", figure(last.accepted), figure(accepted)],
    ["replies lost", figure(missing(last)), figure(Object.values(lost).reduce((sum, count) => sum + count, 0))],
    ...reasons.map((why) => [`lost: ${why}`, figure(last.rejected[why] || 0), figure(lost[why] || 0)]),
  ]);
  const links = Object.entries(last.links);
  if (links.length) {
    table(at("links"), "Payload by link", ["link", "last round", "since the start", "messages"], links.map(([link, [messages, payload]]) => {
      const then = before && before.links[link] ? before.links[link][1] : 0;
      return [link, payload === null ? "n/a" : bytes(payload - (then || 0)), bytes(payload), figure(messages)];
    }));
  }
}

function later() {
  if (!due) { due = true; requestAnimationFrame(draw); }
}

const WORDS = {
  waiting: "Waiting for the run to begin.",
  running: "The run is being written.",
  stopped: "Nobody writes this run, and it did not end by itself: it was stopped, and may go on.",
  finished: "The run is finished.",
};
const source = new EventSource("/events");
let told = "";
source.addEventListener("begin", (event) => {
  const about = JSON.parse(event.data);
  rounds = []; lost = {}; sent = 0; accepted = 0;
  document.title = `${about.folder}: Hedgerow run`;
  at("title").textContent = about.folder;
  at("realism").textContent = [about.app, about.realism].filter(Boolean).join(". ");
  at("settings").replaceChildren(...Object.entries(about.settings).map(([key, value]) => {
    const line = make("li");
    line.append(make("code", `${key} = ${JSON.stringify(value)}`));
    return line;
  }));
  later();
});
source.addEventListener("rounds", (event) => {
  for (const one of JSON.parse(event.data)) {
    rounds.push(one);
    sent += one.sent || 0;
    accepted += one.accepted || 0;
    for (const [why, count] of Object.entries(one.rejected)) lost[why] = (lost[why] || 0) + (count || 0);
  }
  // A week's run would fill the page: of what is old every second round goes.
  if (rounds.length > MOST_POINTS) rounds = rounds.filter((_, i) => i % 2 === 0 || i > rounds.length - 3);
  later();
});
source.addEventListener("state", (event) => {
  const now = JSON.parse(event.data);
  told = [WORDS[now.state] || now.state, now.wrong].filter(Boolean).join(" ");
  at("state").textContent = told;
});
source.onerror = () => { at("state").textContent = "The server does not answer; this page tries again."; };
source.onopen = () => { if (told) at("state").textContent = told; };
