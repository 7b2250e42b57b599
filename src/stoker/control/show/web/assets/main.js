// Draws the frame of the page and the view that the address after # selects: run/ID/tab, compare/A/B, gpus.

import { Curves } from "./curves.js";
import { confirmed, el, fill, setText, tip } from "./dom.js";
import { clock, counted, percent, short, span, when } from "./format.js";
import { RunList, badge, stepText } from "./listing.js";
import { Machines } from "./machines.js";
import { Ranks } from "./ranks.js";
import { LiveSource, SavedSource } from "./source.js";
import { Difference, Ending, Files, Log, Rollouts, Settings, table } from "./texts.js";

const TABS = [["curves", "Curves"], ["rollouts", "Rollouts"], ["ranks", "Ranks"], ["gpus", "GPUs"], ["log", "Log"], ["why", "Why"], ["files", "Files"], ["settings", "Settings"]];

const NO_NUMBERS = new Set(["nan", "inf", "-inf"]);
const STEPS = new Set(["step", "train", "training"]); // these phases are ordinary training and are not shown

// Returns facts about a server of the job: requests and tokens per second while it runs, and totals.
function serverFacts(server) {
  const name = server.role || "server";
  const speeds = [[`${name} requests/s`, server.requests_per_s], [`${name} tokens/s`, server.tokens_per_s]];
  const counts = [[`${name} running`, server.running], [`${name} waiting`, server.waiting], [`${name} weights`, server.weights_version]];
  const totals = `${counted(server.requests, "request")}, ${counted(server.tokens, "token")}`;
  return [...speeds.map(([fact, value]) => [fact, value === null ? "" : short(value)]), ...counts.map(([fact, value]) => [fact, value === null ? "" : String(value)]), [`${name} so far`, totals]];
}

const page = document.getElementById("page");
const status = el("span", { id: "status", class: "quiet", "aria-live": "off" });
const problems = el("div", { class: "note", hidden: true });
let source = null;
let view = null; // {changed(state, changed), redraw()}

function go(address) {
  location.hash = address;
}

function frame() {
  const links = source.live ? [el("a", { href: "#", text: "Runs" }), el("a", { href: "#gpus", text: "GPUs" })] : [];
  const themes = el("button", { type: "button", id: "theme", title: "light or dark", "aria-label": "light or dark", onclick: turnTheme, text: "◐" });
  fill(document.getElementById("top"), el("a", { class: "brand", href: "#", text: "stoker" }), el("nav", {}, links), status, themes);
}

function turnTheme() {
  const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  try {
    localStorage.setItem("stoker-theme", document.documentElement.dataset.theme);
  } catch (problem) {
    console.warn(problem); // a page opened from a file may not store anything
  }
  view?.redraw?.();
}

function showStatus() {
  const state = source.state;
  if (!source.live) {
    setText(status, `saved ${when(state.time)}`);
    return;
  }
  const age = (performance.now() - state.got) / 1000;
  const late = !state.connected || age > state.interval * 2 + 3;
  status.className = late ? "wrong" : "quiet";
  const waiting = state.got ? `no update since ${clock(state.time)}` : "connecting";
  setText(status, late ? waiting : `live, ${clock(state.time)}`);
  problems.hidden = !state.problems.length;
  setText(problems, state.problems.join("; "));
}

class RunView {
  constructor(run, tab) {
    this.run = run;
    this.tab = tab;
    // Created once: replacing a button while it is pressed would lose the click.
    this.title = el("h1", { text: run });
    this.badge = el("span");
    this.button = el("button", { type: "button", id: "stop", class: "danger", hidden: true, onclick: () => this.stop(), text: "Stop" });
    this.about = el("p", { class: "quiet command" });
    this.facts = el("dl", { class: "facts" });
    this.head = el("div", { class: "runhead" }, el("div", { class: "title" }, this.title, this.badge, this.button), this.about, this.facts);
    this.alert = el("div", { class: "alerts", "aria-live": "polite" });
    this.bar = el("nav", { class: "tabs", role: "tablist", "aria-label": "about this run" });
    this.body = el("div");
    this.node = el("div", {}, this.head, this.alert, this.bar, this.body);
    this.showTabs(tab === "rollouts");
    this.part = this.make();
    fill(this.body, this.part.node);
    this.show();
  }

  showTabs(rollouts) {
    if (this.rollouts === rollouts) return;
    this.rollouts = rollouts;
    const shown = TABS.filter(([name]) => (source.live || name !== "gpus") && (rollouts || name !== "rollouts"));
    fill(this.bar, shown.map(([name, text]) => el("a", { role: "tab", href: `#run/${encodeURIComponent(this.run)}/${name}`, "aria-selected": String(name === this.tab), text })));
  }

  make() {
    const make = {
      rollouts: () => new Rollouts(source, this.run),
      curves: () => new Curves(source, [this.run]),
      ranks: () => new Ranks(source, this.run),
      gpus: () => new Machines(source, (_, card) => this.uses(card)),
      log: () => new Log(source, this.run),
      why: () => new Ending(source, this.run),
      files: () => new Files(source, this.run),
      settings: () => new Settings(source, this.run),
    };
    return (make[this.tab] || make.curves)();
  }

  uses(card) {
    const hosts = source.state.runs.get(this.run)?.hosts || [];
    if (!hosts.includes(card.host)) return false;
    if (!card.uuid) return true;
    const cards = new Set([...source.state.ranks.values()].map((rank) => rank.gpu).filter(Boolean));
    return !cards.size || cards.has(card.uuid);
  }

  show() {
    const run = source.state.runs.get(this.run);
    if (!run) {
      setText(this.about, source.state.got || !source.live ? "this run does not exist or was deleted" : "loading");
      fill(this.facts);
      fill(this.badge);
      this.key = "";
      this.button.hidden = true;
      return;
    }
    const going = run.state === "running" || run.state === "unknown";
    const facts = [["step", stepText(run)], ...Object.entries(run.rl), ...run.servers.flatMap(serverFacts), ["loss", short(run.loss)], ["tokens/s", run.tokens_per_s === null ? "" : short(run.tokens_per_s)], ["MFU", run.mfu === null ? "" : percent(run.mfu)], ["ETA", run.eta_s === null ? "" : span(run.eta_s)], ["time", run.seconds === null ? "" : span(run.seconds)], ["ranks", run.world ? String(run.world) : ""], ["phase", STEPS.has(run.phase) || !going ? "" : run.phase], ["restarts", Object.keys(run.restarts).length ? Object.entries(run.restarts).map(([cause, count]) => `${count} × ${cause}`).join(", ") : ""]];
    if (run.headline === "reward") this.showTabs(true);
    const may = source.live && run.mine && going;
    setText(this.title, run.name || this.run);
    setText(this.about, `${this.run} · ${run.user}${run.command ? ` · ${run.command}` : ""}`);
    this.button.hidden = !may;
    const key = JSON.stringify([facts, run.state]);
    if (key !== this.key) {
      this.key = key;
      fill(this.badge, badge(run.state));
      fill(this.facts, facts.filter(([, value]) => value && value !== "n/a").map(([name, value]) => el("div", {}, el("dt", { text: name }), el("dd", { class: NO_NUMBERS.has(value) ? "wrong" : null, text: value }))));
    }
    this.showAlerts(run);
  }

  showAlerts(run) {
    const lines = [...run.slow.map((slow) => ["warn", slow.summary]), ...(run.suspicion && !run.slow.some((slow) => slow.rank === run.suspicion.rank && run.suspicion.cause.startsWith("slow")) ? [["warn", run.suspicion.summary]] : []), ...(run.problem ? [["bad", run.problem]] : []), ...(run.verdict && run.state !== "running" && run.state !== "completed" ? [[run.state === "stopped" ? "off" : "bad", `${run.verdict.cause}: ${run.verdict.summary}`]] : []), ...(this.stopNote ? [["off", this.stopNote]] : [])];
    const key = JSON.stringify(lines);
    if (key === this.alerted) return;
    this.alerted = key;
    fill(this.alert, lines.map(([kind, text]) => el("p", { class: `alert ${kind}` }, text, " ", el("a", { href: `#run/${encodeURIComponent(this.run)}/why`, text: "why" }))));
  }

  async stop() {
    if (!(await confirmed(`Stop ${this.title.textContent}?`, "Its ranks get SIGTERM and time to save, as with `stoker stop`. A stopped run can be resumed from its last checkpoint.", "Stop the run"))) return;
    this.button.disabled = true;
    try {
      this.stopNote = await source.stop(this.run);
    } catch (problem) {
      this.stopNote = problem.message;
    }
    this.button.disabled = false;
    this.show();
  }

  changed(state, changed) {
    this.show();
    this.part.changed?.(state, changed);
  }

  redraw() {
    this.part.redraw?.();
  }
}

class CompareView {
  constructor(runs) {
    this.curves = new Curves(source, runs);
    this.results = el("div");
    this.runs = runs;
    this.node = el("div", {}, el("h1", { class: "alone", text: `${counted(runs.length, "run")} compared` }), this.curves.node, el("h3", { text: "results" }), this.results, new Difference(source, runs).node);
    this.show();
  }

  show() {
    const rows = this.runs.map((id) => [id, source.state.runs.get(id)]).filter(([, run]) => run);
    fill(this.results, table(["run", "state", "step", "last reward or loss", "tokens/s", "time", "restarts"], rows.map(([id, run]) => [el("a", { href: `#run/${encodeURIComponent(id)}`, text: run.name || id }), badge(run.state), stepText(run), run.headline_value === null ? "" : `${run.headline} ${short(run.headline_value)}`, run.tokens_per_s === null ? "" : short(run.tokens_per_s), run.seconds === null ? "" : span(run.seconds), String(Object.values(run.restarts).reduce((sum, count) => sum + count, 0))])));
  }

  changed(state, changed) {
    if (changed.runs) this.show();
    this.curves.changed(state, changed);
  }

  redraw() {
    this.curves.redraw();
  }
}

function route() {
  tip(null, null);
  const parts = location.hash.replace(/^#\/?/, "").split("/").filter(Boolean).map(decode);
  const saved = source.live ? "" : source.data.run;
  if (saved) view = new RunView(saved, parts[0] === "run" ? parts[2] || "curves" : "curves");
  else if (parts[0] === "run" && parts[1]) view = new RunView(parts[1], parts[2] || "curves");
  else if (parts[0] === "compare" && parts.length > 2) view = new CompareView(parts.slice(1, 13));
  else if (parts[0] === "gpus") view = new Machines(source);
  else view = new RunList(source, go);
  source.watch(saved || (parts[0] === "run" ? parts[1] : ""));
  document.title = parts[0] === "run" ? `${parts[1]} · stoker` : "stoker";
  fill(page, problems, view.node);
  page.querySelector('.tabs [aria-selected="true"]')?.scrollIntoView({ block: "nearest", inline: "center" });
  view.redraw?.();
}

function decode(word) {
  try {
    return decodeURIComponent(word);
  } catch {
    return word;
  }
}

function begin() {
  const saved = document.getElementById("saved");
  try {
    const theme = localStorage.getItem("stoker-theme");
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch (problem) {
    console.warn(problem);
  }
  const changed = (state, what) => {
    showStatus();
    view?.changed?.(state, what);
  };
  source = saved ? new SavedSource(JSON.parse(saved.textContent), changed) : new LiveSource(changed);
  frame();
  window.addEventListener("hashchange", route);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => view?.redraw?.());
  setInterval(showStatus, 1000);
  route();
  showStatus();
}

begin();
