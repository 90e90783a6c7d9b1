// The live page: follows ui/events and shows the last minutes of it.

import { Chart, onHover } from "./chart.js";
import { compact, count, duration, percent, rate } from "./words.js";

const KEPT_S = 605;
const RECENT = 5; // snapshots whose choices are "now"
const GOODPUT = 0.9; // attainment that counts as holding the SLO

// How the gate's choices are called and coloured, from the bottom of the stack up.
const CHOICES = [
  ["decode", "decode alone", "decode"],
  ["decode beside prefill", "side by side", "beside"],
  ["hybrid", "hybrid step", "hybrid"],
  ["prefill", "prefill alone", "prefill"],
];
const PHASES = { P: "prefill", D: "decode", PD: "prefill and decode", DP: "prefill and decode" };

const charts = {};
let about = null;
let snapshots = [];
let seconds = 120;
let connection = "connecting"; // or "open", "lost", "closing"

const $ = (selector) => document.querySelector(selector);

// ---- what comes in

function follow() {
  const events = new EventSource("ui/events");
  events.addEventListener("about", (event) => {
    const told = JSON.parse(event.data);
    if (about && told.started_s !== about.started_s) snapshots = [];
    about = told;
    connection = "open";
    introduce();
  });
  events.addEventListener("snapshots", (event) => {
    const last = snapshots.length ? snapshots[snapshots.length - 1].time_s : 0;
    snapshots.push(...JSON.parse(event.data).filter((snapshot) => snapshot.time_s > last));
    const oldest = snapshots[snapshots.length - 1].time_s - KEPT_S;
    snapshots = snapshots.filter((snapshot) => snapshot.time_s >= oldest);
    redraw();
  });
  events.addEventListener("closing", () => {
    connection = "closing";
    redraw();
  });
  events.addEventListener("error", () => {
    if (connection !== "closing") connection = "lost";
    redraw();
  });
}

function introduce() {
  $("#about").textContent = `${about.model} on ${about.device}, by ${about.sharing} · ${about.version}`;
  document.title = `${about.model} · Tidegate`;
  $("#terms").textContent =
    `Latencies and attainment are of requests that ended in the last ${about.window_s} s, as this server saw them; ` +
    `rates are means over ${about.rate_s} s. TTFT: arrival to first token. TPOT: mean time between a request's tokens. ` +
    "The engine is read only while somebody watches: before that, its charts are empty.";
}

// ---- what is shown

function redraw() {
  showState();
  if (!snapshots.length) return;
  const to = snapshots[snapshots.length - 1].time_s;
  const shown = snapshots.filter((snapshot) => snapshot.time_s >= to - seconds - 2);
  const view = { times: shown.map((s) => s.time_s), from: to - seconds, to };
  const latest = shown[shown.length - 1];
  const stats = latest.stats || [...shown].reverse().find((s) => s.stats)?.stats || null;
  const served = (read) => shown.map((s) => read(s.served) ?? null);
  const engine = (read) => shown.map((s) => (s.stats ? read(s.stats) : null));
  const rated = (read) => shown.map((s) => (s.rates ? read(s.rates) : null));
  const all = { view, shown, latest, stats, served, engine, rated };
  for (const show of [showGate, showAttainment, showTtft, showPace, showQueue, showThroughput, showKv, showLanes]) show(all);
}

function showState() {
  const latest = snapshots[snapshots.length - 1];
  const stats = latest?.stats;
  const busy = stats && stats.waiting + stats.prefilling + stats.decoding > 0;
  const dead = latest && !latest.alive;
  const [state, word, why] =
    connection === "connecting" ? ["connecting", "connecting", ""]
    : dead ? ["dead", "engine stopped", "The server has ended with it: start it again. This is how things stood."]
    : connection === "closing" ? ["closing", "shutting down", "The server takes no more requests."]
    : connection === "lost" ? ["lost", "no connection", "Trying again; this is how things stood."]
    : busy ? ["serving", "serving", `${count(stats.prefilling + stats.decoding)} running, ${count(stats.waiting)} waiting`]
    : stats ? ["idle", "idle", "No request is here."]
    : ["waiting", "waiting for a reading", ""];
  const place = $("#state");
  place.dataset.state = state;
  place.querySelector("b").textContent = word;
  place.querySelector(".why").textContent = why;
  document.body.classList.toggle("stale", ["lost", "closing", "dead"].includes(state));
}

function showGate({ view, shown, stats, engine, rated }) {
  const lanes = stats ? Object.entries(stats.lanes).filter(([, lane]) => lane.phases) : [];
  const divided = lanes.length > 1;
  const share = (s) => s.lanes.P?.phases ? s.lanes.P.share : null;
  const pale = shown.map((s) => !(s.rates && ["P", "D"].every((lane) => s.rates.lanes[lane]?.busy > 0)));
  draw("division", {
    ...view, top: 1, exact: true, unit: percent, label: "Division of the compute between prefill and decode",
    nothing: !stats ? "No reading of the engine yet." : divided ? null : "One lane runs prefill and decode on the whole device: there is nothing to divide.",
    series: [
      { name: "prefill", colour: "prefill", kind: "area", pale, values: engine(share), show: percent },
      { name: "decode", colour: "decode", kind: "area", pale, values: engine((s) => (share(s) === null ? null : 1 - share(s))), show: percent },
    ],
  });
  $("#gate h3 small").hidden = !divided;
  const steps = showSteps(view, shown, stats, rated);
  const beside = divided && pale.slice(-RECENT).includes(false);
  const parts = [];
  if (steps) parts.push(bold(steps));
  if (beside) parts.push(steps ? " · prefill : decode " : "prefill : decode ", bold(`${percent(share(stats))} : ${percent(1 - share(stats))}`));
  say("#gate .now", ...parts);
  if (!stats) return;
  const tags = [["mode", stats.mode], ["gate", stats.gate], ["moves", count(stats.gate_moves)], ["order", stats.order], ["batch", `≤ ${count(stats.max_num_batched_tokens)} tokens`]];
  say("#gate .tags", ...tags.filter(([, value]) => value).map(([name, value]) => entry(name, value)));
}

// What each step was, by the gate's choices; where it makes none, by the lanes' batches. Returns what it mostly is now.
function showSteps(view, shown, stats, rated) {
  const chosen = new Set(shown.flatMap((s) => Object.keys(s.rates?.choices_per_s || {})));
  const known = CHOICES.filter(([choice]) => chosen.has(choice));
  const unknown = [...chosen].filter((choice) => !CHOICES.some(([name]) => name === choice)).sort();
  const kinds = [...known, ...unknown.map((choice, i) => [choice, choice, i % 2 ? "other2" : "other"])];
  if (kinds.length) {
    const total = (r) => Object.values(r.choices_per_s).reduce((sum, value) => sum + value, 0);
    const part = (choice) => (r) => (total(r) ? (r.choices_per_s[choice] || 0) / total(r) : null);
    $("#gate .what").textContent = "What each step was, by the gate's choice";
    draw("choices", {
      ...view, top: 1, exact: true, unit: percent, label: "Steps by the gate's choice",
      series: kinds.map(([choice, name, shade]) => ({ name, colour: shade, kind: "area", values: rated(part(choice)), show: percent })),
    });
    const recent = shown.slice(-RECENT).filter((s) => s.rates);
    const sums = kinds.map(([choice, name]) => [name, recent.reduce((sum, s) => sum + (s.rates.choices_per_s[choice] || 0), 0)]);
    const all = sums.reduce((sum, [, value]) => sum + value, 0);
    const [name, most] = sums.reduce((best, one) => (one[1] > best[1] ? one : best));
    return all ? `${name} ${percent(most / all)}` : null;
  }
  const lanes = Object.entries(stats?.lanes || {}).filter(([, lane]) => lane.phases);
  $("#gate .what").textContent = "Batches a second";
  draw("choices", {
    ...view, top: 1, unit: (v) => rate(v), label: "Batches a second of each lane",
    nothing: stats ? null : "No reading of the engine yet.",
    series: lanes.map(([lane, { phases }]) => ({
      name: PHASES[phases] || phases, colour: shadeOf(phases), kind: "area", show: rate, values: rated((r) => r.lanes[lane]?.batches_per_s ?? null),
    })),
  });
  return null;
}

function showAttainment({ view, latest, stats, served }) {
  const { judged, attainment, missed, requests } = latest.served;
  const values = served((s) => s.attainment);
  const limits = stats?.slo_ttft_s ? sloText(stats) : null;
  const none = limits ? "No request has ended lately." : "No SLO: start with --slo ttft=…,tpot=…, or send X-SLO with a request.";
  draw("attainment", {
    ...view, top: 1, exact: true, unit: percent, label: "Part of the requests that attain their SLO",
    nothing: values.some((v) => v !== null) ? null : none,
    limit: { value: GOODPUT, text: percent(GOODPUT) },
    series: [{ name: "attained", colour: "good", kind: "line", values, show: percent }],
  });
  const parts = [];
  if (judged) parts.push(bold(percent(attainment), attainment >= GOODPUT ? "good" : "bad"), ` of ${count(judged)} requests`);
  else if (requests && !limits) parts.push(`${count(requests)} requests without an SLO`);
  say("#attainment .now", ...parts);
  say("#attainment .tags", ...(limits ? [entry("SLO", limits)] : judged ? ["SLOs of the requests' own"] : []));
  const pace = stats?.slo_metric === "gap" ? "gaps" : "TPOT";
  const names = { ttft: "by TTFT", tpot: `by ${pace}`, both: "by both", failed: "failed" };
  const rows = latest.served.by_prompt.map((quarter) => {
    const bar = element("div", "track", element("div", quarter.attainment >= GOODPUT ? "" : "bad"));
    bar.firstChild.style.width = `${quarter.attainment * 100}%`;
    const range = quarter.from_tokens === quarter.to_tokens ? count(quarter.from_tokens) : `${count(quarter.from_tokens)}–${count(quarter.to_tokens)}`;
    return row(`${range} tokens`, bar, percent(quarter.attainment));
  });
  $("#attainment h3").hidden = !rows.length;
  $("#attainment tbody").replaceChildren(...rows);
  const reasons = Object.entries(missed).map(([reason, n]) => `${count(n)} ${names[reason]}`);
  say("#attainment .missed", reasons.length ? `Missed: ${reasons.join(" · ")}` : "");
}

function showTtft(all) {
  showLatency(all, "ttft", (served) => served.ttft_s, all.stats?.slo_ttft_s, "Time to first token");
}

// An SLO on gaps is held against each request's p99 gap, so that is shown then.
function showPace(all) {
  const gaps = all.stats?.slo_metric === "gap";
  $("#pace h2").textContent = gaps ? "p99 gap of each request" : "TPOT";
  const read = (served) => (gaps ? served.gap_p99_s : served.tpot_s);
  showLatency(all, "pace", read, all.stats?.slo_tpot_s, gaps ? "Gaps between tokens" : "Time per output token");
}

function showLatency({ view, latest, served }, name, read, limit, label) {
  const at = (field) => served((s) => read(s)?.[field]);
  const [p50, p90, p99] = [at("p50"), at("p90"), at("p99")];
  draw(name, {
    ...view, top: limit ? limit * 1.25 : 0, unit: duration, label,
    nothing: p50.some((v) => v !== null) ? null : "No request has ended lately.",
    limit: limit ? { value: limit, text: `SLO ${duration(limit)}` } : null,
    series: [
      { name: "p50–p90", colour: "decode", kind: "band", values: p50, upper: p90, show: null },
      { name: "p99", colour: "other", kind: "dashed", values: p99, show: duration, unscaled: true },
      { name: "p90", colour: "decode", kind: "line", values: p90, show: duration },
      { name: "p50", colour: "gate", kind: "line", values: p50, show: duration },
    ],
  });
  const now = read(latest.served);
  if (!now) return say(`#${name} .now`, limit ? `SLO ${duration(limit)}` : "");
  const verdict = limit ? (now.p90 <= limit ? "good" : "bad") : "";
  return say(`#${name} .now`, "p90 ", bold(duration(now.p90), verdict), limit ? ` of ${duration(limit)}` : "");
}

function showQueue({ view, stats, engine }) {
  const late = engine((s) => s.late);
  const series = [
    { name: "decoding", colour: "decode", kind: "area", values: engine((s) => s.decoding), show: count },
    { name: "in prefill", colour: "prefill", kind: "area", values: engine((s) => s.prefilling), show: count },
    { name: "waiting", colour: "idle", kind: "area", values: engine((s) => s.waiting), show: count },
  ];
  if (stats?.slo_ttft_s) series.push({ name: "late", colour: "bad", kind: "line", values: late, show: count });
  draw("queue", { ...view, top: 4, whole: true, unit: count, label: "Requests by what happens to them", series, nothing: stats ? null : "No reading of the engine yet." });
  if (stats) say("#queue .now", bold(count(stats.prefilling + stats.decoding)), " running · ", bold(count(stats.waiting)), " waiting", ...(stats.late ? [" · ", bold(count(stats.late), "bad"), " late"] : []));
}

function showThroughput({ view, latest, served }) {
  draw("throughput", {
    ...view, top: 10, unit: rate, label: "Tokens a second",
    series: [
      { name: "prompt tokens/s", colour: "prefill", kind: "line", values: served((s) => s.prompt_tokens_per_s), show: rate },
      { name: "output tokens/s", colour: "decode", kind: "line", values: served((s) => s.output_tokens_per_s), show: rate },
    ],
  });
  say("#throughput .now", bold(rate(latest.served.requests_per_s)), " requests/s");
}

function showKv({ view, stats, engine }) {
  const part = (read) => engine((s) => (s.blocks_total ? read(s) / s.blocks_total : null));
  draw("kv", {
    ...view, top: 1, exact: true, unit: percent, label: "KV blocks by state", nothing: stats ? null : "No reading of the engine yet.",
    series: [
      { name: "used", colour: "decode", kind: "area", values: part((s) => s.blocks_used), show: percent },
      { name: "cached", colour: "beside", kind: "area", values: part((s) => s.blocks_cached), show: percent },
      { name: "free", colour: "idle", kind: "area", values: part((s) => s.blocks_free), show: percent },
    ],
  });
  if (!stats) return;
  const tokens = (blocks) => compact(blocks * about.block_size);
  const hits = stats.prefix_queries_tokens ? ` · prefix hits ${percent(stats.prefix_hits_tokens / stats.prefix_queries_tokens)}` : "";
  say("#kv .now", bold(tokens(stats.blocks_used)), ` of ${tokens(stats.blocks_total)} tokens${hits}`);
}

function showLanes({ view, latest, stats, rated }) {
  const lanes = Object.entries(stats?.lanes || {}).filter(([, lane]) => lane.phases);
  draw("busy", {
    ...view, top: 1, exact: true, unit: percent, label: "Part of the time that each lane is busy",
    nothing: stats ? null : "No reading of the engine yet.",
    series: lanes.map(([name, lane]) => ({
      name: `${name} busy`, colour: shadeOf(lane.phases), kind: "line", values: rated((r) => r.lanes[name]?.busy ?? null), show: percent,
    })),
  });
  const down = lanes.filter(([, lane]) => !lane.alive);
  say("#lanes .now", ...(!stats ? [] : down.length && latest.alive ? [bold(`${down.map(([name]) => name).join(", ")} starting again`, "bad")] : [`${lanes.length} in mode ${stats.mode}`]));
  const rows = lanes.map(([name, lane]) => {
    const rates = latest.rates?.lanes[name];
    const alive = lane.alive && latest.alive;
    const dot = element("span", `dot ${alive ? "up" : "down"}`);
    dot.title = alive ? "alive" : "down";
    const tokens = rates ? rate(rates.prefill_tokens_per_s + rates.decode_tokens_per_s) : "–";
    return row(element("span", "name", dot, name), PHASES[lane.phases] || lane.phases, percent(lane.share), rates ? rate(rates.batches_per_s) : "–", tokens, count(lane.restarts));
  });
  $("#lanes tbody").replaceChildren(...rows);
}

function shadeOf(phases) {
  return { P: "prefill", D: "decode" }[phases] || "hybrid";
}

// As people give it to --slo, or nearly.
function sloText(stats) {
  return `TTFT ${duration(stats.slo_ttft_s)}, ${stats.slo_metric === "gap" ? "gaps" : "TPOT"} ${duration(stats.slo_tpot_s)}`;
}

// ---- parts of the page; texts never become markup

function draw(name, plot) {
  charts[name].draw(plot);
}

function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

function bold(text, className = "") {
  return element("b", className, text);
}

function entry(name, value) {
  return element("span", "", `${name} `, bold(value));
}

function row(...cells) {
  return element("tr", "", ...cells.map((cell) => element("td", "", cell)));
}

function say(place, ...parts) {
  $(place).replaceChildren(...parts);
}

// ---- start

for (const figure of document.querySelectorAll("figure[data-chart]")) charts[figure.dataset.chart] = new Chart(figure);
for (const button of document.querySelectorAll("#span button")) {
  button.addEventListener("click", () => {
    seconds = Number(button.dataset.seconds);
    for (const other of document.querySelectorAll("#span button")) other.setAttribute("aria-pressed", String(other === button));
    redraw();
  });
}
onHover(redraw);
addEventListener("resize", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
showState();
follow();
