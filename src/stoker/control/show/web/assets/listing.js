// Shows the list of runs with state, step, reward or loss and a sparkline. Selected runs can be compared.

import { spark } from "./chart.js";
import { el, fill, setText } from "./dom.js";
import { counted, short, span, when } from "./format.js";

const SPARK_S = 10; // the sparkline of a running run is updated this often
const REWARDED = 1e12; // runs with rewards sort after those with losses, the highest reward first
const ORDERS = {
  started: (run) => run.started || 0,
  name: (run) => (run.name || run.id).toLowerCase(),
  state: (run) => run.state,
  step: (run) => run.step ?? -1,
  loss: (run) => (typeof run.headline_value !== "number" ? Infinity : run.headline === "reward" ? REWARDED - run.headline_value : run.headline_value),
  speed: (run) => (typeof run.tokens_per_s === "number" ? run.tokens_per_s : -1),
};
const HEADS = [["name", "run"], ["state", "state"], ["step", "step"], ["loss", "reward or loss"], [null, ""], ["speed", "tokens/s"], [null, "time"], ["started", "started"]];

export function badge(state) {
  const kinds = { running: "good", completed: "done", failed: "bad", lost: "bad", damaged: "bad", refused: "bad", stopped: "off", unknown: "off" };
  return el("span", { class: `badge ${kinds[state] || "off"}`, text: state });
}

export function stepText(run) {
  if (run.step === null || run.step === undefined) return "n/a";
  return run.total_steps ? `${run.step} / ${run.total_steps}` : String(run.step);
}

export class RunList {
  constructor(source, go) {
    this.source = source;
    this.go = go;
    this.order = "started";
    this.down = true;
    this.chosen = new Set();
    this.rows = new Map();
    this.sparks = new Map();
    this.filter = el("input", { type: "search", id: "filter", placeholder: "filter: name, state, user, command", "aria-label": "filter the runs", oninput: () => this.build() });
    this.compare = el("button", { type: "button", id: "compare", disabled: true, onclick: () => this.go(`compare/${[...this.chosen].map(encodeURIComponent).join("/")}`) });
    this.count = el("span", { class: "quiet" });
    this.head = el("div", { class: "row head", role: "row" });
    this.body = el("div", { class: "rows", role: "rowgroup" });
    this.reports = el("div", { class: "reports" });
    this.node = el("section", { class: "list" }, el("div", { class: "bar" }, this.filter, this.compare, this.count), this.reports, el("div", { class: "table", role: "table", "aria-label": "runs" }, this.head, this.body));
    this.seen = new IntersectionObserver((entries) => this.appear(entries));
    this.wanted = new Set();
    source.ask("reports").then((data) => this.showReports(data.reports)).catch(() => {});
    this.build();
  }

  showReports(reports) {
    if (!reports.length) return;
    const links = reports.slice(0, 8).map((report) => el("a", { href: this.source.file(report.run, "report.html"), target: "_blank", rel: "noopener noreferrer", text: report.run }));
    fill(this.reports, el("span", { class: "quiet", text: "reports: " }), links.flatMap((link) => [link, " "]));
  }

  build() {
    const words = this.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const runs = [...this.source.state.runs].filter(([id, run]) => {
      const text = `${id} ${run.name} ${run.state} ${run.user} ${run.command}`.toLowerCase();
      return words.every((word) => text.includes(word));
    });
    const key = ORDERS[this.order];
    runs.sort(([, a], [, b]) => {
      const [x, y] = [key({ ...a }), key({ ...b })];
      return (x < y ? -1 : Number(x > y)) * (this.down ? -1 : 1);
    });
    fill(this.head, el("span", {}), HEADS.map(([name, text]) => this.headCell(name, text)));
    this.seen.disconnect();
    fill(this.body, runs.length ? runs.map(([id, run]) => this.row(id, run)) : el("p", { class: "empty", text: words.length ? "no run matches the filter" : "no run yet: start one with `stoker run train.py`" }));
    for (const { node } of this.rows.values()) if (node.isConnected || node.parentNode) this.seen.observe(node);
    const others = this.source.state.others;
    setText(this.count, counted(runs.length, "run") + (others ? `, ${others} of other users not shown (--all)` : ""));
    this.showChoice();
  }

  headCell(name, text) {
    if (!name) return el("span", { text });
    const sorted = this.order === name;
    const turn = () => {
      this.down = sorted ? !this.down : name === "started";
      this.order = name;
      this.build();
    };
    return el("button", { type: "button", class: "sort", onclick: turn, text: text + (sorted ? (this.down ? " ↓" : " ↑") : "") });
  }

  row(id, run) {
    let row = this.rows.get(id);
    if (!row) {
      const cells = Object.fromEntries(["name", "state", "step", "loss", "spark", "speed", "time", "started"].map((name) => [name, el("span", { class: `cell ${name}` })]));
      const box = el("input", { type: "checkbox", "aria-label": `compare ${id}`, onchange: (event) => this.choose(id, event.target.checked) });
      const canvas = el("canvas", { class: "spark", "aria-hidden": "true" });
      cells.spark.append(canvas);
      const node = el("div", { class: "row", role: "row" }, el("span", { class: "cell pick" }, box), Object.values(cells));
      node.dataset.run = id;
      row = { node, cells, box, canvas };
      this.rows.set(id, row);
    }
    this.update(id, run, row);
    return row.node;
  }

  update(id, run, row) {
    const { cells } = row;
    const nameKey = JSON.stringify([run.name, run.world, run.mine, this.problemOf(run)]);
    if (row.nameKey !== nameKey) fill(cells.name, el("a", { href: `#run/${encodeURIComponent(id)}`, text: run.name || id }), el("small", { text: `${run.name ? `${id} · ` : ""}${run.world ? counted(run.world, "rank") : ""}${run.mine ? "" : ` · ${run.user}`}` }), this.makeProblem(run));
    row.nameKey = nameKey; // replacing a link while it is pressed would lose the click
    if (cells.state.textContent !== run.state) fill(cells.state, badge(run.state));
    setText(cells.step, stepText(run));
    setText(cells.loss, short(run.headline_value));
    cells.loss.dataset.name = run.headline;
    cells.loss.classList.toggle("wrong", typeof run.headline_value === "string");
    setText(cells.speed, run.tokens_per_s === null ? "" : short(run.tokens_per_s));
    setText(cells.time, run.seconds === null ? "" : span(run.seconds));
    setText(cells.started, when(run.started));
  }

  problemOf(run) {
    return run.problem || (run.slow[0] && run.slow[0].summary) || (run.suspicion && run.suspicion.summary) || (run.state === "failed" && run.verdict && run.verdict.summary) || "";
  }

  makeProblem(run) {
    const text = this.problemOf(run);
    return text ? el("small", { class: "trouble", text }) : null;
  }

  appear(entries) {
    for (const entry of entries) {
      const id = entry.target.dataset.run;
      if (!entry.isIntersecting) this.wanted.delete(id);
      else this.wanted.add(id);
    }
    this.fetchSparks();
  }

  async fetchSparks() {
    const now = performance.now() / 1000;
    const due = [...this.wanted].filter((id) => {
      const known = this.sparks.get(id), run = this.source.state.runs.get(id);
      return run && (!known || (run.state === "running" && now - known.at > SPARK_S));
    }).slice(0, 40);
    if (!due.length || this.isFetching) return;
    this.isFetching = true;
    due.forEach((id) => this.sparks.set(id, { at: now, values: this.sparks.get(id)?.values || [] }));
    try {
      const sparks = await this.source.ask("sparks", { runs: due });
      for (const [id, values] of Object.entries(sparks)) {
        this.sparks.set(id, { at: now, values });
        const row = this.rows.get(id);
        if (row) spark(row.canvas, values);
      }
    } catch (problem) {
      console.warn(problem);
    } finally {
      this.isFetching = false;
    }
  }

  choose(id, on) {
    on ? this.chosen.add(id) : this.chosen.delete(id);
    this.showChoice();
  }

  showChoice() {
    for (const id of [...this.chosen]) if (!this.source.state.runs.has(id)) this.chosen.delete(id);
    this.compare.disabled = this.chosen.size < 2;
    this.compare.textContent = this.chosen.size ? `compare ${this.chosen.size}` : "compare";
  }

  changed(state, changed) {
    const fresh = changed.runs && [...changed.runs].some((id) => !this.rows.has(id));
    if (fresh || changed.gone || changed.whole) {
      for (const id of [...this.rows.keys()]) if (!state.runs.has(id)) this.rows.delete(id);
      this.build();
    } else if (changed.runs) {
      for (const id of changed.runs) {
        const row = this.rows.get(id), run = state.runs.get(id);
        if (row && run) this.update(id, run, row);
      }
    }
    this.fetchSparks();
  }

  redraw() {
    for (const [id, known] of this.sparks) if (this.rows.has(id)) spark(this.rows.get(id).canvas, known.values);
  }
}

