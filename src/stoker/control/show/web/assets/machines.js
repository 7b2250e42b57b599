// Shows hosts and their GPUs.

import { spark } from "./chart.js";
import { el, fill, setText } from "./dom.js";
import { bytes, percent, short } from "./format.js";

function meter(share, tone) {
  const inner = el("i", { class: tone || "" });
  inner.style.width = `${Math.round(Math.max(0, Math.min(1, share || 0)) * 100)}%`;
  return el("span", { class: "meter" }, inner);
}

export class Machines {
  // wanted(key, card) selects the GPUs to show (default: all)
  constructor(source, wanted) {
    this.source = source;
    this.wanted = wanted || (() => true);
    this.cards = new Map();
    this.node = el("section", { class: "machines" });
    this.changed(source.state, { whole: true });
  }

  changed(state, changed) {
    const shown = [...state.gpus].filter(([key, card]) => this.wanted(key, card));
    const names = [...state.hosts.keys()].filter((name) => shown.some(([, card]) => card.host === name) || this.wanted(null, { host: name }));
    const key = names.join("\n") + "\t" + shown.map(([gpuKey]) => gpuKey).join("\n");
    if (key !== this.key) {
      this.key = key;
      this.build(state, names, shown);
    }
    for (const name of names) this.showHost(name, state.hosts.get(name));
    for (const [gpuKey, card] of shown) this.showCard(gpuKey, card, state.recent.get(gpuKey) || []);
  }

  build(state, names, shown) {
    this.hosts = new Map();
    this.cards = new Map();
    const known = new Set(names);
    const strays = [...new Set(shown.map(([, card]) => card.host))].filter((host) => !known.has(host));
    fill(
      this.node,
      [...names, ...strays].map((name) => {
        const facts = el("span", { class: "quiet" });
        this.hosts.set(name, facts);
        const cards = shown.filter(([, card]) => card.host === name).map(([key]) => this.makeCard(key));
        return el("div", { class: "host" }, el("h3", {}, name, " ", facts), cards.length ? el("div", { class: "gpus" }, cards) : el("p", { class: "quiet", text: "no GPUs are known on this host" }));
      }),
      names.length || strays.length ? null : el("p", { class: "empty", text: "no host has responded yet" }),
    );
  }

  makeCard(key) {
    const parts = { title: el("b"), name: el("small"), use: el("div", { class: "line" }), memory: el("div", { class: "line" }), heat: el("div", { class: "line" }), held: el("div", { class: "held" }), who: el("small", { class: "who" }), canvas: el("canvas", { class: "spark wide", "aria-hidden": "true" }) };
    this.cards.set(key, parts);
    return el("div", { class: "gpu" }, el("div", { class: "line" }, parts.title, parts.name), parts.canvas, parts.use, parts.memory, parts.heat, parts.held, parts.who);
  }

  showHost(name, host) {
    const facts = this.hosts.get(name);
    if (!facts || !host) return;
    if (host.state !== "OK") {
      setText(facts, `${host.state}: ${host.reason}`);
      facts.className = "wrong";
      return;
    }
    facts.className = "quiet";
    const used = host.memory_total && host.memory_available !== null ? `${bytes(host.memory_total - host.memory_available)} of ${bytes(host.memory_total)}` : "n/a";
    const net = host.received === null ? "" : ` · network ${bytes(host.received)}/s in, ${bytes(host.sent)}/s out`;
    const disk = host.disk_free === null ? "" : ` · disk ${bytes(host.disk_free)} free`;
    setText(facts, `${host.cores ?? "?"} cores, CPU ${percent(host.cpu)} · memory ${used}${disk}${net}${host.gpu_error ? ` · ${host.gpu_error}` : ""}`);
  }

  showCard(key, card, values) {
    const parts = this.cards.get(key);
    if (!parts) return;
    setText(parts.title, card.label);
    setText(parts.name, (card.name || "").replace("NVIDIA ", ""));
    if (card.error) {
      setText(parts.held, card.error);
      return;
    }
    fill(parts.use, el("span", { class: "key", text: "GPU" }), meter(card.utilization), el("span", { class: "num", text: percent(card.utilization) }));
    fill(parts.memory, el("span", { class: "key", text: "mem" }), meter(card.memory_total ? card.memory_used / card.memory_total : 0, "mem"), el("span", { class: "num", text: bytes(card.memory_used) }));
    const clock = card.clock ? ` · ${short(card.clock / 1e6)} MHz` : "";
    setText(parts.heat, `${card.temperature ?? "n/a"} °C · ${card.power === null ? "n/a" : Math.round(card.power)}${card.power_limit ? ` / ${Math.round(card.power_limit)}` : ""} W${clock}`);
    setText(parts.held, (card.throttle || []).join(", "));
    setText(parts.who, card.processes.map((process) => `${process.user || "?"} ${process.pid}${process.run ? ` ${process.run.split("/").pop()}` : ""}`).join(", "));
    spark(parts.canvas, values, { low: 0, high: 1, tone: "c2" });
  }

  redraw() {
    for (const [key, parts] of this.cards) spark(parts.canvas, this.source.state.recent.get(key) || [], { low: 0, high: 1, tone: "c2" });
  }
}
