// Charts over time on a canvas. A chart is given series and a span of time, draws them, and says below in words and
// numbers what it shows: of now, or of the moment under the pointer, which all charts share.

const AXIS_WIDTH = 44;
const FOOT_HEIGHT = 15;
const TOP = 5;
const GAP_S = 2.6; // points that are further apart are not connected

const hovers = new Set();
let hoveredAt = null;

// The time under the pointer, in seconds since the epoch; null without one.
export function onHover(redraw) {
  hovers.add(redraw);
}

function hover(at) {
  if (at !== hoveredAt) {
    hoveredAt = at;
    for (const redraw of hovers) redraw();
  }
}

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// A series is {name, colour, values: [number | null], kind, show}. kind: "area" (stacked upon the areas before it),
// "line", "dashed", or "band" (from values to upper). pale: [boolean], where an area is drawn weakly. show: how to word
// a value, null to leave the series out of the caption.
export class Chart {
  constructor(figure) {
    this.height = Number(figure.dataset.height || 128);
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("role", "img");
    this.canvas.style.height = `${this.height}px`;
    this.nothing = document.createElement("p");
    this.nothing.className = "nothing";
    this.nothing.style.height = `${this.height - FOOT_HEIGHT}px`;
    this.caption = document.createElement("figcaption");
    figure.append(this.canvas, this.nothing, this.caption);
    this.plot = null;
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerdown", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => hover(null));
  }

  // plot: {times, from, to, series, top, exact, whole, unit: value => text, limit: {value, text}, nothing, label}.
  // top: the least value at the upper edge, or, with exact, the value there. whole: values are whole numbers.
  // nothing: what to say instead of a chart.
  draw(plot) {
    this.plot = plot;
    this.nothing.textContent = plot.nothing || "";
    this.canvas.setAttribute("aria-label", plot.nothing ? `${plot.label}: ${plot.nothing}` : plot.label);
    const ratio = window.devicePixelRatio || 1;
    const width = this.canvas.clientWidth;
    if (!width) return;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = `10.5px ${getComputedStyle(document.body).fontFamily}`;
    const area = { left: AXIS_WIDTH, right: width - 1, top: TOP, bottom: this.height - FOOT_HEIGHT };
    const stacked = stack(plot.series);
    const top = plot.exact ? plot.top : niceTop(Math.max(plot.top || 0, highest(stacked, plot)), plot.whole);
    const x = (t) => area.left + ((t - plot.from) / (plot.to - plot.from)) * (area.right - area.left);
    const y = (v) => area.bottom - (Math.min(v, top) / top) * (area.bottom - area.top);
    this.frame(pen, area, x, y, top);
    if (!plot.nothing) {
      pen.save();
      pen.beginPath();
      pen.rect(area.left, area.top - 2, area.right - area.left, area.bottom - area.top + 3);
      pen.clip();
      for (const series of stacked) drawSeries(pen, plot.times, series, x, y);
      pen.restore();
      if (plot.limit) this.limit(pen, area, y(plot.limit.value), plot.limit.text);
    }
    const at = this.nearest();
    if (hoveredAt !== null && at !== null && !plot.nothing) this.crosshair(pen, area, x(plot.times[at]), plot.times[at]);
    this.describe(plot, at);
  }

  frame(pen, area, x, y, top) {
    const { from, to, unit, nothing } = this.plot;
    pen.strokeStyle = colour("grid");
    pen.fillStyle = colour("soft");
    pen.lineWidth = 1;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (const part of [0, 0.5, 1]) {
      const at = Math.round(y(top * part)) + 0.5;
      line(pen, area.left, at, area.right, at);
      if (!nothing) pen.fillText(unit(top * part), area.left - 6, at);
    }
    if (nothing) return;
    const span = to - from;
    const step = span > 300 ? 120 : 30;
    pen.textBaseline = "alphabetic";
    for (let back = 0; back <= span + 0.5; back += step) {
      const at = Math.round(x(to - back)) - 0.5;
      line(pen, at, area.top, at, area.bottom);
      pen.textAlign = back === 0 ? "right" : at - area.left < 12 ? "left" : "center";
      pen.fillText(back === 0 ? "now" : span > 300 ? `−${back / 60} min` : `−${back} s`, at, area.bottom + 12);
    }
  }

  limit(pen, area, at, text) {
    pen.strokeStyle = pen.fillStyle = colour("bad");
    pen.lineWidth = 1.25;
    pen.setLineDash([5, 4]);
    line(pen, area.left, at, area.right, at);
    pen.setLineDash([]);
    pen.textAlign = "left";
    pen.textBaseline = at - area.top < 14 ? "top" : "bottom";
    const inset = area.left + 5;
    const below = pen.textBaseline === "top" ? 2 : -2;
    pen.lineWidth = 5;
    pen.lineJoin = "round";
    pen.strokeStyle = colour("card");
    pen.strokeText(text, inset, at + below);
    pen.fillText(text, inset, at + below);
  }

  crosshair(pen, area, at, time) {
    pen.strokeStyle = colour("text");
    pen.lineWidth = 1;
    line(pen, Math.round(at) + 0.5, area.top, Math.round(at) + 0.5, area.bottom);
    const text = new Date(time * 1000).toLocaleTimeString();
    const half = pen.measureText(text).width / 2 + 4;
    const middle = Math.min(Math.max(at, area.left + half), area.right - half);
    pen.fillStyle = colour("card");
    pen.fillRect(middle - half, area.bottom + 1, 2 * half, FOOT_HEIGHT);
    pen.fillStyle = colour("text");
    pen.textAlign = "center";
    pen.textBaseline = "alphabetic";
    pen.fillText(text, middle, area.bottom + 12);
  }

  describe(plot, at) {
    this.caption.replaceChildren();
    if (plot.nothing) return;
    for (const series of plot.series) {
      if (!series.show) continue;
      const entry = document.createElement("span");
      const key = document.createElement("i");
      if (series.kind === "area" || series.kind === "band") key.style.background = colour(series.colour);
      else key.style.borderColor = colour(series.colour);
      key.className = { line: "stroke", dashed: "stroke dashed" }[series.kind] || "";
      const value = document.createElement("b");
      const shown = at === null ? null : series.values[at];
      value.textContent = shown === null || shown === undefined ? "–" : series.show(shown);
      entry.append(key, series.name, value);
      this.caption.append(entry);
    }
  }

  // The index of the point under the pointer, else of the last one; null without points.
  nearest() {
    const { times } = this.plot;
    if (!times.length) return null;
    if (hoveredAt === null) return times.length - 1;
    let best = 0;
    for (let i = 1; i < times.length; i++) {
      if (Math.abs(times[i] - hoveredAt) < Math.abs(times[best] - hoveredAt)) best = i;
    }
    return best;
  }

  point(event) {
    const { from, to } = this.plot;
    const box = this.canvas.getBoundingClientRect();
    const part = (event.clientX - box.left - AXIS_WIDTH) / (box.width - 1 - AXIS_WIDTH);
    hover(part < 0 ? null : from + part * (to - from));
  }
}

function line(pen, x1, y1, x2, y2) {
  pen.beginPath();
  pen.moveTo(x1, y1);
  pen.lineTo(x2, y2);
  pen.stroke();
}

// Areas get the sum of those below as their base.
function stack(series) {
  let sums = null;
  return series.map((one) => {
    if (one.kind !== "area") return one;
    const base = sums || one.values.map(() => 0);
    sums = one.values.map((value, i) => (value === null ? base[i] : base[i] + value));
    return { ...one, base, upper: sums };
  });
}

function highest(series, plot) {
  let most = 0;
  for (const one of series) {
    if (one.unscaled) continue;
    const values = one.upper || one.values;
    for (let i = 0; i < values.length; i++) {
      if (plot.times[i] >= plot.from && values[i] !== null && values[i] > most) most = values[i];
    }
  }
  return most;
}

// The upper edge: a round number a little above. whole: its half is to be a whole number too.
function niceTop(value, whole) {
  if (value <= 0) return 1;
  if (whole && value < 10) return 2 * Math.ceil(value / 2);
  const power = 10 ** Math.floor(Math.log10(value));
  for (const step of [1, 1.2, 1.6, 2, 2.4, 3, 4, 5, 6, 8, 10]) {
    if (value <= step * power * 0.97) return step * power;
  }
  return 12 * power;
}

// Runs of neighbouring points that have a value.
function runs(times, values) {
  const found = [];
  let run = null;
  for (let i = 0; i < times.length; i++) {
    if (values[i] === null || values[i] === undefined) {
      run = null;
    } else if (run === null || times[i] - times[i - 1] > GAP_S) {
      found.push((run = [i]));
    } else {
      run.push(i);
    }
  }
  return found;
}

function drawSeries(pen, times, series, x, y) {
  const shade = colour(series.colour);
  for (const run of runs(times, series.values)) {
    if (series.kind === "area" || series.kind === "band") {
      const low = series.kind === "band" ? series.values : series.base;
      pen.fillStyle = shade;
      for (const part of series.pale ? split(run, series.pale) : [run]) {
        pen.globalAlpha = series.kind === "band" ? 0.2 : series.pale && series.pale[part[part.length - 1]] ? 0.22 : 0.9;
        pen.beginPath();
        part.forEach((i, n) => (n ? pen.lineTo(x(times[i]), y(series.upper[i])) : pen.moveTo(x(times[i]), y(series.upper[i]))));
        for (const i of [...part].reverse()) pen.lineTo(x(times[i]), y(low[i]));
        pen.fill();
      }
      pen.globalAlpha = 1;
    } else {
      pen.strokeStyle = shade;
      pen.lineWidth = series.kind === "dashed" ? 1.25 : 1.75;
      pen.lineJoin = "round";
      pen.setLineDash(series.kind === "dashed" ? [3, 3] : []);
      pen.beginPath();
      run.forEach((i, n) => (n ? pen.lineTo(x(times[i]), y(series.values[i])) : pen.moveTo(x(times[i]), y(series.values[i]))));
      if (run.length === 1) pen.lineTo(x(times[run[0]]) + 1.5, y(series.values[run[0]]));
      pen.stroke();
      pen.setLineDash([]);
    }
  }
}

// A run in parts that are all pale or all not; a point belongs to the stretch that ends in it.
function split(run, pale) {
  const parts = [[run[0]]];
  for (let n = 1; n < run.length; n++) {
    const part = parts[parts.length - 1];
    if (part.length > 1 && Boolean(pale[run[n]]) !== Boolean(pale[run[n - 1]])) parts.push([run[n - 1], run[n]]);
    else part.push(run[n]);
  }
  return parts;
}
