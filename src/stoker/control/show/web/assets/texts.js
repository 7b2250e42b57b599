// Shows logs with search, the verdict with stacks, files, and settings. Inserts everything that a run wrote as text.

import { el, fill, setText } from "./dom.js";
import { bytes, clock, counted, short, when } from "./format.js";

const MAX_CHARACTERS = 400_000; // of a log on the page

export class Log {
  constructor(source, run) {
    this.source = source;
    this.run = run;
    this.attempt = null;
    this.rank = "0";
    this.end = null;
    this.rankBox = el("select", { id: "rank", "aria-label": "rank", onchange: () => this.begin() });
    this.attemptBox = el("select", { id: "attempt", "aria-label": "attempt", onchange: () => this.begin() });
    this.words = el("input", { type: "search", id: "find", placeholder: "search this log", "aria-label": "search this log", onchange: () => this.search() });
    this.follow = el("input", { type: "checkbox", checked: true, id: "follow" });
    this.wrap = el("input", { type: "checkbox", id: "wrap", onchange: () => this.text.classList.toggle("wrapped", this.wrap.checked) });
    this.text = el("pre", { class: "log", tabindex: "0" });
    this.found = el("div", { class: "found", hidden: true });
    this.earlier = el("button", { type: "button", hidden: true, onclick: () => this.back(), text: "earlier lines" });
    this.note = el("span", { class: "quiet" });
    this.node = el("section", {}, el("div", { class: "bar" }, this.rankBox, this.attemptBox, this.words, source.live ? el("label", {}, this.follow, " follow") : null, el("label", {}, this.wrap, " wrap"), this.earlier, this.note), this.found, this.text);
    this.load();
  }

  begin() {
    this.rank = this.rankBox.value;
    this.attempt = this.attemptBox.value;
    this.end = null;
    this.load();
    if (this.words.value) this.search();
  }

  params() {
    return { run: this.run, rank: this.rank, attempt: this.attempt };
  }

  async load(from = null) {
    if (this.loading) return;
    this.loading = true;
    try {
      const data = await this.source.ask("log", { ...this.params(), from });
      this.boxes(data);
      if (from === null) {
        this.text.textContent = data.text;
        this.start = data.begin;
      } else if (data.text) {
        const kept = this.text.textContent;
        this.text.textContent = (kept + data.text).slice(-MAX_CHARACTERS);
        if (kept.length + data.text.length > MAX_CHARACTERS) this.start = null;
      }
      this.end = data.end;
      this.earlier.hidden = !this.start || !this.source.live;
      setText(this.note, data.size ? bytes(data.size) : "nothing printed yet");
      if (this.follow.checked) this.text.scrollTop = this.text.scrollHeight;
    } catch (problem) {
      setText(this.note, problem.message);
    } finally {
      this.loading = false;
    }
  }

  async back() {
    const from = Math.max(0, this.start - 96 * 1024);
    const data = await this.source.ask("log", { ...this.params(), from });
    const cut = data.text.slice(0, Math.max(0, data.text.length - Math.max(0, data.end - this.start)));
    this.follow.checked = false;
    this.text.textContent = cut + this.text.textContent;
    this.start = from;
    this.earlier.hidden = from === 0;
  }

  boxes(data) {
    const ranks = [...data.ranks.map((rank) => [String(rank), `rank ${rank}`]), ["stoker", "Stoker's own log"]];
    const key = `${ranks.length} ${data.attempts.join()} ${data.attempt}`;
    if (key === this.key) return;
    this.key = key;
    fill(this.rankBox, ranks.map(([value, text]) => el("option", { value, text })));
    if (!ranks.some(([value]) => value === this.rank)) this.rank = ranks[0][0];
    this.rankBox.value = this.rank;
    fill(this.attemptBox, data.attempts.map((attempt) => el("option", { value: String(attempt), text: `attempt ${attempt}` })));
    this.attemptBox.hidden = data.attempts.length < 2;
    this.attemptBox.value = String(data.attempt);
    this.attempt = String(data.attempt);
  }

  async search() {
    const find = this.words.value;
    this.found.hidden = !find;
    if (!find) return;
    try {
      const data = await this.source.ask("log", { ...this.params(), find });
      const part = data.searched < data.size ? ` in the last ${bytes(data.searched)}` : "";
      const shown = data.count > data.matches.length ? `, the last ${data.matches.length} shown` : "";
      fill(this.found, el("div", { class: "quiet", text: `${counted(data.count, "line")}${part}${shown}` }), data.matches.map((match) => el("button", { type: "button", class: "match", onclick: () => this.jump(match.at) }, lit(match.text, find))));
    } catch (problem) {
      fill(this.found, el("div", { class: "wrong", text: problem.message }));
    }
  }

  async jump(at) {
    if (at === null) return;
    this.follow.checked = false;
    const from = Math.max(0, at - 4000);
    const data = await this.source.ask("log", { ...this.params(), from });
    const text = from ? data.text.slice(data.text.indexOf("\n") + 1) : data.text;
    const [line] = (await this.source.ask("log", { ...this.params(), from: at })).text.split("\n");
    const index = text.indexOf(line);
    const mark = el("mark", { text: line });
    fill(this.text, index < 0 ? text : [text.slice(0, index), mark, text.slice(index + line.length)]);
    this.start = from;
    this.end = data.end;
    if (index >= 0) mark.scrollIntoView({ block: "center" });
  }

  changed() {
    if (this.source.live && this.follow.checked && this.end !== null) this.load(this.end);
  }
}

// Marks the first match in a text.
function lit(text, needle) {
  const at = text.toLowerCase().indexOf(needle.toLowerCase());
  if (at < 0) return text;
  return [text.slice(0, at), el("mark", { text: text.slice(at, at + needle.length) }), text.slice(at + needle.length)];
}

export class Ending {
  constructor(source, run) {
    this.source = source;
    this.run = run;
    this.node = el("section", { class: "ending" });
    this.load();
  }

  async load() {
    try {
      this.show(await this.source.ask("ending", { run: this.run }));
    } catch (problem) {
      fill(this.node, el("p", { class: "wrong", text: problem.message }));
    }
  }

  show({ verdict, told, stacks }) {
    const key = JSON.stringify([verdict, told.length, stacks.map((one) => [one.name, one.text.length])]);
    if (key === this.key) return;
    this.key = key;
    const list = (title, lines) => (lines && lines.length ? [el("h3", { text: title }), el("ul", {}, lines.map((line) => el("li", {}, el("pre", { text: line }))))] : []);
    const parts = verdict
      ? [
          el("p", { class: "cause" }, el("b", { text: verdict.cause }), ` · ${verdict.status}, exit code ${verdict.exit_code}${verdict.rank === null ? "" : ` · rank ${verdict.rank}`}${verdict.host ? ` on ${verdict.host}` : ""}`),
          el("p", { class: "summary", text: verdict.summary }),
          list("evidence", verdict.evidence),
          list("what to do", verdict.fix),
        ]
      : [el("p", { class: "quiet", text: "no verdict yet: the run has not ended" })];
    const events = told.length ? [el("h3", { text: "reported while it ran" }), el("ol", { class: "marks" }, [...told].reverse().map((one) => el("li", { class: one.kind }, el("time", { text: clock(one.time) }), el("b", { text: one.kind }), el("span", { text: one.text }), one.evidence.length ? el("pre", { text: one.evidence.join("\n") }) : null)))] : [];
    const texts = stacks.length ? [el("h3", { text: "stacks" }), stacks.map((one, at) => el("details", { open: at === 0 }, el("summary", { text: one.name }), el("pre", { class: "stack", text: one.text })))] : [];
    fill(this.node, parts, events, texts);
  }

  changed(state, changed) {
    if (changed.runs && changed.runs.has(this.run)) this.load();
  }
}

// Rollouts of a GRPO run: prompts with their completions and rewards, newest step first.
export class Rollouts {
  constructor(source, run) {
    this.source = source;
    this.run = run;
    this.note = el("span", { class: "quiet" });
    this.newest = el("button", { type: "button", id: "newest", onclick: () => this.load(null), text: "newest" });
    this.older = el("button", { type: "button", id: "older", hidden: true, onclick: () => this.load(this.begin), text: "older" });
    this.rows = el("div", { class: "rollouts" });
    this.node = el("section", {}, el("div", { class: "bar" }, source.live ? this.newest : null, this.older, this.note), this.rows);
    this.load(null);
  }

  async load(before) {
    try {
      const data = await this.source.ask("rollouts", { run: this.run, before });
      this.begin = data.begin;
      this.older.hidden = !this.source.live || !data.begin;
      this.shown = data.rollouts.length;
      setText(this.note, `${counted(this.shown, "completion")}, newest step first`);
      fill(this.rows, bySteps(data.rollouts));
      if (before !== null) this.rows.scrollIntoView({ block: "start" });
    } catch (problem) {
      setText(this.note, problem.message);
    }
  }

  changed() {
    if (this.source.live && !this.shown) this.load(null); // don't replace completions that the user may be reading
  }
}

function bySteps(rollouts) {
  const steps = new Map();
  for (const rollout of rollouts) {
    const prompts = steps.get(rollout.step) || new Map();
    prompts.set(rollout.row, [...(prompts.get(rollout.row) || []), rollout]);
    steps.set(rollout.step, prompts);
  }
  return [...steps].flatMap(([step, prompts]) => [el("h3", { text: `step ${step}` }), [...prompts.values()].map(prompted)]);
}

function prompted(completions) {
  return el("div", { class: "card rollout" }, el("pre", { class: "prompt", text: completions[0].prompt }), completions.map(completed));
}

function completed(rollout) {
  const parts = Object.entries(rollout.parts).map(([name, value]) => el("span", { class: "quiet", text: `${name} ${short(value)}` }));
  const grade = rollout.correct === null ? null : el("span", { class: `badge ${rollout.correct ? "good" : "bad"}`, title: "graded like `stoker train evaluate` does", text: rollout.correct ? "correct" : "wrong" });
  const marks = [el("b", { text: `reward ${short(rollout.reward)}` }), grade, rollout.cut ? el("span", { class: "badge off", text: "truncated" }) : null, el("span", { class: "quiet", text: counted(rollout.tokens, "token") }), parts];
  return el("div", { class: "completion" }, el("div", { class: "marks-of" }, marks), el("pre", { text: rollout.completion || "(empty)" }));
}

const GROUPS = [["report", "reports"], ["rows", "rollouts, samples and answers"], ["picture", "pictures"], ["text", "other text files"], ["record", "run record"]];

export class Files {
  constructor(source, run) {
    this.source = source;
    this.run = run;
    this.node = el("section", { class: "files" });
    this.rows = el("div", { class: "rollouts" });
    source.ask("files", { run }).then((data) => this.show(data)).catch((problem) => fill(this.node, el("p", { class: "wrong", text: problem.message })));
  }

  show({ files, checkpoints }) {
    const saved = checkpoints.length ? table(["checkpoint", "size", "saved", ""], checkpoints.map((file) => [file.name, bytes(file.size), when(file.time), file.newest ? "newest complete" : ""]), "sizes") : el("p", { class: "quiet", text: "no checkpoints" });
    const groups = GROUPS.map(([kind, title]) => {
      const members = files.filter((file) => file.kind === kind);
      return members.length ? [el("h3", { text: title }), table(["file", "size", "changed"], members.map((file) => [this.link(file), bytes(file.size), when(file.time)]), "sizes")] : [];
    });
    fill(this.node, el("h3", { text: "checkpoints" }), saved, this.rows, groups);
  }

  link(file) {
    if (file.kind === "rows") return el("button", { type: "button", class: "plain", onclick: () => this.open(file.path, 0), text: file.path });
    const href = this.source.file(this.run, file.path);
    return href ? el("a", { href, target: "_blank", rel: "noopener noreferrer", text: file.path }) : file.path;
  }

  async open(path, from) {
    try {
      const data = await this.source.ask("rows", { run: this.run, path, from });
      const next = data.end < data.size && this.source.live ? el("button", { type: "button", onclick: () => this.open(path, data.end), text: "next" }) : null;
      const start = from ? el("button", { type: "button", onclick: () => this.open(path, 0), text: "from the start" }) : null;
      fill(this.rows, el("div", { class: "bar" }, el("b", { text: path }), start, next), data.rows.map(row));
      this.rows.scrollIntoView({ block: "start" });
    } catch (problem) {
      fill(this.rows, el("p", { class: "wrong", text: problem.message }));
    }
  }
}

function row(data) {
  if (data === null || typeof data !== "object" || Array.isArray(data)) return el("div", { class: "card" }, el("pre", { text: typeof data === "string" ? data : JSON.stringify(data) }));
  return el("dl", { class: "card pairs" }, Object.entries(data).flatMap(([name, value]) => [el("dt", { text: name }), el("dd", { text: typeof value === "string" ? value : JSON.stringify(value) })]));
}

export function table(heads, rows, look = null) {
  return el("div", { class: "scroll" }, el("table", { class: look }, el("thead", {}, el("tr", {}, heads.map((text) => el("th", { text })))), el("tbody", {}, rows.map((cells) => el("tr", {}, cells.map((cell) => el("td", {}, cell)))))));
}

export class Settings {
  constructor(source, run) {
    this.node = el("section");
    source.ask("settings", { run }).then((data) => fill(this.node, table(["setting", "value"], data.settings))).catch((problem) => fill(this.node, el("p", { class: "wrong", text: problem.message })));
  }
}

export class Difference {
  constructor(source, runs) {
    this.node = el("section", { id: "difference" });
    source.ask("compare", { runs }).then((data) => this.show(data, runs, source)).catch((problem) => fill(this.node, el("p", { class: "wrong", text: problem.message })));
  }

  show({ settings, noise, metric, equal }, runs, source) {
    const names = runs.map((run) => source.state.runs.get(run)?.name || run);
    const same = equal.length ? [el("h3", { text: "at equal steps" }), table(["metric", "step", ...names], equal.map(([name, step, values]) => [name, String(step), ...values]))] : [];
    fill(this.node, same, el("h3", { text: "settings that differ" }), settings.length ? table(["setting", ...names], settings.map(([key, values]) => [key, ...values])) : el("p", { class: "quiet", text: "none" }), noise ? el("p", { text: judged(noise, names, metric) }) : null);
  }
}

function judged(noise, names, metric) {
  const better = metric === "reward" ? noise.difference > 0 : noise.difference < 0;
  const means = `${metric} over steps ${noise.first_step} to ${noise.last_step}: ${noise.first.toPrecision(4)} and ${noise.second.toPrecision(4)}`;
  if (noise.low === null) return `${means}; too few points to judge`;
  const interval = `difference ${noise.difference.toPrecision(3)}, 95 % interval ${noise.low.toPrecision(3)} to ${noise.high.toPrecision(3)}`;
  return `${means}; ${interval}: ${noise.beyond ? `more than noise; ${names[better ? 1 : 0]} is ${metric === "reward" ? "higher" : "lower"} (noise of batches only: another seed may move a run by more)` : "within the noise"}`;
}
