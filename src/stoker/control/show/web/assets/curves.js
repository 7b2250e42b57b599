// Shows the curves of one run or of several overlaid, with controls for metrics, smoothing, axis and steps.

import { LINES, LineChart } from "./chart.js";
import { colour, el, fill, setText } from "./dom.js";
import { counted } from "./format.js";

const POINTS = 600;
const FIRST = ["loss", "val_loss", "tokens_per_s", "grad_norm", "lr"];
const FIRST_WITH_REWARD = ["reward", "kl", "entropy", "length", "cut", "staleness", "server_requests_per_s", "server_tokens_per_s", "loss"];
const LABELS = { kl: "KL", cut: "cut (share truncated)", staleness: "staleness (steps)", weights_version: "weights (version that generated the completions)", server_requests_per_s: "server: requests/s", server_tokens_per_s: "server: generated tokens/s" };
const SHOWN = 9;
const METRICS_PER_REQUEST = 20;
const SMOOTHED = [1, 5, 10, 20, 50, 100, 200, 500]; // the run's logging interval is added

export class Curves {
  constructor(source, runs) {
    this.source = source;
    this.runs = runs; // ids
    this.names = [];
    this.picked = null;
    this.range = null;
    this.smooth = 1;
    this.levels = SMOOTHED;
    this.interval = 1;
    this.log = false;
    this.charts = new Map(); // metric -> {chart, card, data: Map(run -> curve)}
    this.note = el("p", { class: "note", hidden: true });
    this.metrics = el("div", { class: "chips", role: "group", "aria-label": "metrics" });
    this.amount = el("output", { class: "amount", text: "off" });
    this.slider = el("input", { type: "range", id: "smooth", min: 0, max: SMOOTHED.length - 1, value: 0, "aria-label": "smoothing", oninput: () => this.setSmooth() });
    this.axis = el("input", { type: "checkbox", id: "log", onchange: () => this.setLog() });
    this.reset = el("button", { type: "button", id: "reset", disabled: true, onclick: () => this.zoom(null), text: "all steps" });
    this.grid = el("div", { class: "grid" });
    this.node = el(
      "section",
      { class: "curves" },
      el("div", { class: "bar" }, el("label", {}, "smooth ", this.slider, this.amount), el("label", {}, this.axis, " log axis"), this.reset, el("span", { class: "quiet hint", text: "drag over a chart to zoom, double click for all" })),
      this.metrics,
      runs.length > 1 ? this.legend() : null,
      this.note,
      this.grid,
    );
    this.load(true);
  }

  legend() {
    return el(
      "div",
      { class: "legend" },
      this.runs.map((run, at) => {
        const swatch = el("span", { class: "swatch" });
        swatch.style.background = colour(`c${at % LINES}`);
        return el("a", { href: `#run/${encodeURIComponent(run)}` }, swatch, this.nameOf(run));
      }),
    );
  }

  nameOf(run) {
    return this.source.state.runs.get(run)?.name || run;
  }

  isOver(run) {
    const state = this.source.state.runs.get(run)?.state;
    return Boolean(state) && state !== "running" && state !== "unknown";
  }

  setSmooth() {
    this.smooth = this.levels[Number(this.slider.value)];
    this.showAmount();
    this.load(true);
  }

  showAmount() {
    setText(this.amount, this.smooth > 1 ? `${this.smooth} values` : "off");
  }

  // If the metrics have every step, start with means over the logging interval.
  startAt(interval) {
    if (!(interval > this.interval)) return;
    this.interval = this.smooth = interval;
    this.levels = [...new Set([...SMOOTHED, interval])].sort((a, b) => a - b);
    this.slider.max = this.levels.length - 1;
    this.slider.value = this.levels.indexOf(interval);
    this.showAmount();
  }

  setLog() {
    this.log = this.axis.checked;
    for (const { chart } of this.charts.values()) {
      chart.log = this.log;
      chart.draw();
    }
  }

  zoom(range) {
    this.range = range;
    this.reset.disabled = !range;
    for (const { chart } of this.charts.values()) chart.show(range);
    this.load(true);
  }

  choose(name, on) {
    on ? this.picked.add(name) : this.picked.delete(name);
    this.layOut();
    this.load(true);
  }

  layOut() {
    const wanted = this.names.filter((name) => this.picked.has(name));
    for (const name of [...this.charts.keys()]) if (!wanted.includes(name)) this.charts.delete(name);
    for (const name of wanted) {
      if (this.charts.has(name)) continue;
      const chart = new LineChart(name, (range) => this.zoom(range));
      chart.log = this.log;
      chart.range = this.range;
      const last = el("span", { class: "last" });
      this.charts.set(name, { chart, last, data: new Map(), card: el("figure", { class: "card" }, el("figcaption", {}, el("b", { text: LABELS[name] || name }), last), chart.node) });
    }
    this.grid.classList.toggle("single", wanted.length === 1);
    const key = wanted.join("\n");
    if (key !== this.laid) {
      this.laid = key;
      fill(this.grid, wanted.map((name) => this.charts.get(name).card));
    }
  }

  showNames(names) {
    if (names.join("\n") === this.names.join("\n")) return;
    this.names = names;
    if (!this.picked || ![...this.picked].some((name) => names.includes(name))) {
      const first = (names.includes("reward") ? FIRST_WITH_REWARD : FIRST).filter((name) => names.includes(name));
      this.picked = new Set((first.length ? first : names).slice(0, SHOWN));
    }
    fill(this.metrics, names.map((name) => el("label", { class: "chip" }, el("input", { type: "checkbox", checked: this.picked.has(name), onchange: (event) => this.choose(name, event.target.checked) }), name)));
    this.layOut();
  }

  // whole: fetch everything; else only new points.
  async load(whole) {
    if (this.loading) {
      this.again = this.again || whole;
      return;
    }
    this.loading = true;
    try {
      this.problem = "";
      if (!this.names.length) await Promise.all(this.runs.map((run) => this.loadFirst(run)));
      await Promise.all(this.runs.map((run) => this.loadRun(run, whole)));
      setText(this.note, this.names.length ? this.problem : this.problem || `no metrics${this.runs.every((run) => this.isOver(run)) ? "" : " yet"}: they come from \`stoker train\`, or from a script that prints its loss or calls stoker.beat`);
    } catch (problem) {
      setText(this.note, problem.message);
    } finally {
      this.note.hidden = !this.note.textContent;
      this.loading = false;
      if (this.again !== undefined && this.again !== null) {
        const next = this.again;
        this.again = null;
        this.load(next);
      }
    }
  }

  // Fetch the metric names and the reward or loss first: all curves of a long run take the server longer.
  async loadFirst(run) {
    const answer = await this.source.ask("curves", { run, names: ["reward", "loss"], most: POINTS });
    this.showNames([...new Set([...this.names, ...answer.names])]);
    this.startAt(answer.interval);
    this.take(run, answer, null, new Map());
    for (const name of this.smooth > 1 ? [] : ["reward", "loss"]) {
      const curve = this.charts.get(name)?.data.get(run);
      if (curve) curve.loaded = true;
    }
  }

  async loadRun(run, whole) {
    const mustReload = whole || this.smooth > 1 || Boolean(this.range);
    const [first, last] = this.range || [];
    const since = new Map(), asked = new Map(); // metric -> number of known points; number of known points -> metrics
    for (const [name, { data }] of this.charts) {
      const known = data.get(run);
      if (known?.loaded) {
        known.loaded = false;
        continue;
      }
      if (known && !mustReload && known.steps.length < 2 * POINTS) since.set(name, known.count);
      const count = since.get(name) ?? null;
      asked.set(count, [...(asked.get(count) || []), name]);
    }
    for (const [count, names] of [...asked].flatMap(([known, some]) => parts(some).map((part) => [known, part]))) {
      const params = { run, names, most: POINTS, first, last };
      const [plain, smooth] = await Promise.all([
        this.source.ask("curves", { ...params, since: count }),
        this.smooth > 1 ? this.source.ask("curves", { ...params, smooth: this.smooth }) : null,
      ]);
      this.showNames([...new Set([...this.names, ...plain.names])]);
      this.take(run, plain, smooth, since);
    }
  }

  take(run, plain, smooth, since) {
    if (plain.problem) this.problem = plain.problem;
    for (let [name, curve] of Object.entries(plain.curves)) {
      const entry = this.charts.get(name);
      if (!entry) continue;
      if (since.has(name)) {
        const known = entry.data.get(run);
        if (curve.count < since.get(name)) {
          this.again = true; // the file was replaced
          continue;
        }
        curve = { ...curve, steps: known.steps.concat(curve.steps), values: known.values.concat(curve.values) };
      }
      entry.data.set(run, { ...curve, smooth: smooth ? smooth.curves[name] : null });
      this.draw(entry);
    }
  }

  draw(entry) {
    const series = [];
    this.runs.forEach((run, at) => {
      const curve = entry.data.get(run);
      if (!curve) return;
      if (curve.smooth && this.smooth !== this.interval) series.push({ name: this.nameOf(run), at, steps: curve.steps, values: curve.values, faint: true });
      series.push({ name: this.nameOf(run), at, ...(curve.smooth || curve) });
    });
    entry.chart.set(series);
    const bad = this.runs.reduce((sum, run) => sum + (entry.data.get(run)?.bad || 0), 0);
    setText(entry.last, bad ? `${counted(bad, "value")} not finite` : "");
    entry.last.classList.toggle("wrong", bad > 0);
  }

  changed(state, changed) {
    if (changed.runs && this.runs.some((run) => changed.runs.has(run))) this.load(false);
  }

  redraw() {
    for (const { chart } of this.charts.values()) chart.draw();
  }
}

function parts(names) {
  return names.length ? [names.slice(0, METRICS_PER_REQUEST), ...parts(names.slice(METRICS_PER_REQUEST))] : [];
}
