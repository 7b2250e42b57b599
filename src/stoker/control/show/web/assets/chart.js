// Line charts on a canvas. Zoom by dragging or by keyboard (arrows, + - 0); a double click shows all.

import { colour, drawable, el, tip } from "./dom.js";
import { short } from "./format.js";
import { Zoom } from "./zoom.js";

export const LINES = 8; // number of colours; further lines are dashed
const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3]];

export class LineChart {
  // series: [{name, at (number of its colour), steps, values, faint?}]; onzoom gets [first, last] or null
  constructor(title, onzoom) {
    this.title = title;
    this.onzoom = onzoom;
    this.series = [];
    this.range = null;
    this.log = false;
    this.hover = null;
    this.canvas = el("canvas", { class: "chart", tabindex: "0", role: "img", "aria-label": title });
    this.node = el("div", { class: "plot" }, this.canvas);
    this.zoom = new Zoom(this.canvas, {
      whole: () => this.whole || this.extent(),
      shown: () => this.range || this.extent(),
      at: (x) => (this.frame ? this.stepAt(x) : null),
      zoomed: (range) => (this.onzoom ? this.onzoom(range) : this.show(range)),
      moved: (event) => this.move(event),
      left: () => this.leave(),
    });
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  set(series) {
    this.series = series;
    const last = series.map((curve) => curve.values[curve.values.length - 1]);
    this.canvas.setAttribute("aria-label", `${this.title}: ${series.map((curve, at) => `${curve.name} ${short(last[at])}`).join(", ")}`);
    this.draw();
  }

  extent() {
    let low = Infinity, high = -Infinity;
    for (const curve of this.series) {
      if (!curve.steps.length) continue;
      low = Math.min(low, curve.steps[0]);
      high = Math.max(high, curve.steps[curve.steps.length - 1]);
    }
    return low <= high ? [low, high === low ? low + 1 : high] : [0, 1];
  }

  draw() {
    const [pen, width, height] = drawable(this.canvas);
    if (width < 40 || height < 40) return;
    const xs = this.range || this.extent();
    const ys = this.heights(xs);
    pen.font = "11px system-ui, sans-serif";
    const ticks = ys ? marks(ys[0], ys[1], Math.max(2, Math.floor(height / 45)), this.log) : [];
    const labels = ticks.map(([, value]) => short(value));
    const left = Math.ceil(Math.max(24, ...labels.map((label) => pen.measureText(label).width))) + 10;
    const box = { left, right: width - 10, top: 8, bottom: height - 22 };
    this.frame = { box, xs };
    const x = (step) => box.left + ((step - xs[0]) / (xs[1] - xs[0])) * (box.right - box.left);
    const y = (value) => box.bottom - ((value - ys[0]) / (ys[1] - ys[0])) * (box.bottom - box.top);
    pen.strokeStyle = colour("line");
    pen.fillStyle = colour("quiet");
    pen.lineWidth = 1;
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    ticks.forEach(([at], number) => {
      const down = Math.round(y(at)) + 0.5;
      pen.beginPath();
      pen.moveTo(box.left, down);
      pen.lineTo(box.right, down);
      pen.stroke();
      pen.fillText(labels[number], box.left - 6, down);
    });
    pen.textBaseline = "alphabetic";
    pen.textAlign = "center";
    for (const [at, value] of marks(xs[0], xs[1], Math.max(2, Math.floor(width / 110)), false)) {
      const label = short(value), half = pen.measureText(label).width / 2;
      pen.fillText(label, Math.min(Math.max(x(at), box.left + half - 8), box.right - half + 8), height - 6);
    }
    if (!ys) {
      pen.fillText("no finite values here", (box.left + box.right) / 2, height / 2);
      return;
    }
    pen.save();
    pen.beginPath();
    pen.rect(box.left, box.top - 4, box.right - box.left, box.bottom - box.top + 8);
    pen.clip();
    for (const curve of this.series) this.line(pen, curve, x, y, box);
    pen.restore();
    const marked = this.zoom.marked;
    if (marked) {
      pen.fillStyle = colour("select");
      pen.fillRect(marked[0], box.top, marked[1] - marked[0], box.bottom - box.top);
    } else if (this.hover !== null) {
      pen.strokeStyle = colour("quiet");
      pen.beginPath();
      pen.moveTo(Math.round(x(this.hover)) + 0.5, box.top);
      pen.lineTo(Math.round(x(this.hover)) + 0.5, box.bottom);
      pen.stroke();
    }
  }

  line(pen, curve, x, y, box) {
    pen.strokeStyle = colour(`c${curve.at % LINES}`);
    pen.fillStyle = pen.strokeStyle;
    pen.globalAlpha = curve.faint ? 0.25 : 1;
    pen.lineWidth = curve.faint ? 1 : 1.6;
    pen.lineJoin = "round";
    pen.setLineDash(DASHES[Math.floor(curve.at / LINES) % DASHES.length]);
    pen.beginPath();
    let drawing = false;
    const bad = [], alone = []; // steps whose values are not finite; positions of single points between gaps
    for (let at = 0; at < curve.steps.length; at++) {
      const value = this.height(curve.values[at]);
      if (value === null) {
        if (typeof curve.values[at] === "string") bad.push(curve.steps[at]);
        drawing = false;
        continue;
      }
      const px = x(curve.steps[at]), py = y(value);
      if (drawing) pen.lineTo(px, py);
      else {
        pen.moveTo(px, py);
        if (at + 1 >= curve.steps.length || this.height(curve.values[at + 1]) === null) alone.push([px, py]);
      }
      drawing = true;
    }
    pen.stroke();
    for (const [px, py] of alone) pen.fillRect(px - 2, py - 2, 4, 4);
    pen.setLineDash([]);
    pen.globalAlpha = 1;
    pen.fillStyle = colour("bad");
    for (const step of bad) pen.fillRect(x(step) - 1, box.bottom - 7, 2.5, 7); // a tick at the bottom marks a value that is not finite
  }

  height(value) {
    if (typeof value !== "number") return null;
    if (!this.log) return value;
    return value > 0 ? Math.log10(value) : null;
  }

  heights(xs) {
    let low = Infinity, high = -Infinity;
    for (const curve of this.series) {
      for (let at = 0; at < curve.steps.length; at++) {
        if (curve.steps[at] < xs[0] || curve.steps[at] > xs[1]) continue;
        const value = this.height(curve.values[at]);
        if (value === null) continue;
        low = Math.min(low, value);
        high = Math.max(high, value);
      }
    }
    if (low > high) return null;
    const margin = high > low ? (high - low) * 0.04 : Math.abs(high) * 0.05 || 0.5;
    return [low - margin, high + margin];
  }

  stepAt(px) {
    const { box, xs } = this.frame;
    return xs[0] + ((px - box.left) / (box.right - box.left)) * (xs[1] - xs[0]);
  }

  move(event) {
    if (!this.frame) return;
    this.hover = Math.min(Math.max(this.stepAt(event.offsetX), this.frame.xs[0]), this.frame.xs[1]);
    const points = this.series.filter((curve) => !curve.faint).map((curve) => [curve, nearest(curve, this.hover)]).filter(([, at]) => at >= 0);
    if (points.length && !this.zoom.marked) {
      const [first, at] = points[0];
      this.hover = first.steps[at];
      tip(event, [
        `step ${first.steps[at]}`,
        ...points.slice(0, 12).map(([curve, index]) => {
          const swatch = el("span", { class: "swatch" });
          swatch.style.background = colour(`c${curve.at % LINES}`);
          return el("div", {}, swatch, `${points.length > 1 ? `${curve.name}: ` : ""}${short(curve.values[index])}`);
        }),
      ]);
    } else tip(event, null);
    this.draw();
  }

  leave() {
    this.hover = null;
    tip(null, null);
    this.draw();
  }

  show(range) {
    if (!this.range && range) this.whole = this.extent();
    this.range = range;
    if (!range) this.whole = null;
    this.draw();
  }
}

function nearest(curve, step) {
  let low = 0, high = curve.steps.length - 1;
  if (high < 0) return -1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (curve.steps[middle] < step) low = middle + 1;
    else high = middle;
  }
  return low > 0 && Math.abs(curve.steps[low - 1] - step) < Math.abs(curve.steps[low] - step) ? low - 1 : low;
}

// Returns [position, value] of round numbers from low to high; on a logarithmic axis positions are exponents.
function marks(low, high, count, log) {
  if (log) {
    const ticks = [], every = Math.max(1, Math.ceil((high - low) / count));
    for (let power = Math.ceil(low); power <= high; power += every) ticks.push([power, 10 ** power]);
    if (ticks.length >= 2) return ticks;
    return marks(10 ** low, 10 ** high, count, false).filter(([at]) => at > 0).map(([at, value]) => [Math.log10(at), value]);
  }
  const range = high - low;
  if (!(range > 0)) return [[low, low]];
  const minStep = range / count, size = 10 ** Math.floor(Math.log10(minStep));
  const step = size * ([1, 2, 5, 10].find((factor) => factor * size >= minStep) || 10);
  const ticks = [];
  const first = Math.ceil(low / step);
  // Count the steps, because from 2 ** 53 on adding a step may not change a number.
  for (let number = 0; number <= count && (first + number) * step <= high; number++) {
    const value = Number(((first + number) * step).toPrecision(12));
    ticks.push([value, value]);
  }
  return ticks;
}

export function spark(canvas, values, { low = null, high = null, tone = "c0" } = {}) {
  const [pen, width, height] = drawable(canvas);
  const known = values.filter((value) => typeof value === "number");
  if (!known.length || !width) return;
  const bottom = low ?? Math.min(...known), top = high ?? Math.max(...known);
  pen.strokeStyle = colour(tone);
  pen.lineWidth = 1.4;
  pen.lineJoin = "round";
  pen.beginPath();
  let drawing = false;
  values.forEach((value, at) => {
    if (typeof value !== "number") {
      drawing = false;
      return;
    }
    const x = 1 + (at / Math.max(values.length - 1, 1)) * (width - 2);
    const y = height - 2 - (top > bottom ? (value - bottom) / (top - bottom) : 0.5) * (height - 4);
    drawing ? pen.lineTo(x, y) : pen.moveTo(x, y);
    drawing = true;
  });
  pen.stroke();
}
