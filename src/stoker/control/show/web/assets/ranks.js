// Shows ranks now and over time: which waited, which kept the others waiting, and which were stuck.

import { colour, drawable, el, fill, setText, tip } from "./dom.js";
import { bytes, clock, percent, span, when } from "./format.js";
import { Zoom } from "./zoom.js";

const WIDEST = 720; // with more columns the timeline is fetched again, thinned
const WORDS = { ".": "unknown", p: "in a phase it announced (saving, validating)", w: "in one collective for more than 5 s", s: "no sign of progress for more than 10 s" };
const HEADS = ["rank", "GPU", "state", "step", "step time", "waiting", "phase", "last progress", "memory"];

function tone(letter) {
  if (letter === "s") return colour("bad");
  if (letter === "w") return colour("stall");
  if (letter === "p") return colour("phase");
  return null;
}

function shareOf(letter) {
  const at = "ABCDEFGHIJK".indexOf(letter);
  return at < 0 ? null : at / 10;
}

export class Ranks {
  constructor(source, run) {
    this.source = source;
    this.run = run;
    this.data = null;
    this.range = null; // of times; null: all
    this.canvas = el("canvas", { class: "heat", tabindex: "0", role: "img", "aria-label": "ranks over time" });
    this.reset = el("button", { type: "button", id: "all-times", disabled: true, onclick: () => this.zoom.to(null), text: "all times" });
    this.zoom = new Zoom(this.canvas, {
      whole: () => this.whole || this.extent(),
      shown: () => this.range || this.extent(),
      at: (x) => this.timeAt(x),
      zoomed: (range) => this.show(range),
      moved: (event) => this.hover(event),
      left: () => this.leave(),
    });
    this.legend = el("div", { class: "legend" }, this.keys());
    this.note = el("p", { class: "quiet" });
    this.marks = el("ol", { class: "marks" });
    this.table = el("div", { class: "scroll" });
    this.when = el("h3", { text: "now" });
    this.node = el("section", { class: "ranks" }, el("h3", { text: "over time: share of its time that each rank waits for others" }), this.legend, el("div", { class: "bar" }, this.reset, el("span", { class: "quiet hint", text: "drag over the chart to zoom, double click for all" })), el("div", { class: "card" }, this.canvas, this.note), this.when, this.table, el("h3", { text: "events" }), this.marks);
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    this.showTable();
    this.load();
  }

  keys() {
    const swatch = (paint, text) => {
      const box = el("span", { class: "swatch" });
      box.style.background = paint;
      return el("span", {}, box, text);
    };
    return [swatch(this.heat(0), "0 %"), swatch(this.heat(0.5), "50 %"), swatch(this.heat(1), "100 % waiting"), swatch(colour("stall"), "long in a collective"), swatch(colour("bad"), "no sign of progress"), swatch(colour("phase"), "saving, validating"), el("span", {}, el("b", { class: "late", text: "•" }), "the others wait for it")];
  }

  heat(share) {
    return `color-mix(in oklab, ${colour("hot")} ${Math.round(share * 100)}%, ${colour("cold")})`;
  }

  async load() {
    if (this.loading) return;
    this.loading = true;
    try {
      const known = this.data, range = this.range;
      const grows = !range && known && !known.range && known.times.length && known.times.length < WIDEST;
      const [first, last] = range || [];
      const fresh = await this.source.ask("ranks", { run: this.run, since: grows ? known.times[known.times.length - 1] : null, first, last });
      this.data = grows ? joined(known, fresh) : { ...within(fresh, range), range };
      const none = range ? "nothing recorded in this time" : "nothing recorded: a run that ends within seconds has no history";
      setText(this.note, this.data.times.length ? "" : none);
      this.note.hidden = !this.note.textContent;
      this.canvas.hidden = !this.data.times.length;
      this.draw();
      this.showMarks();
    } catch (problem) {
      setText(this.note, problem.message);
    } finally {
      this.loading = false;
      if (this.again) {
        this.again = false;
        this.load();
      }
    }
  }

  extent() {
    const times = this.data?.times || [];
    return times.length > 1 ? [times[0], times[times.length - 1]] : [0, 1];
  }

  // The columns have equal widths; each stands for one time.
  timeAt(x) {
    if (!this.data || this.data.times.length < 2) return null;
    const { left, wide } = this.place();
    return this.data.times[Math.min(Math.max(Math.floor((x - left) / wide), 0), this.data.times.length - 1)];
  }

  show(range) {
    if (!this.range && range) this.whole = this.extent();
    this.range = range;
    if (!range) this.whole = null;
    this.reset.disabled = !range;
    tip(null, null);
    if (this.loading) this.again = true;
    else this.load();
  }

  leave() {
    tip(null, null);
    this.draw();
  }

  place() {
    const { times, ranks } = this.data;
    const left = 64, right = 8, bottom = 20;
    const tall = Math.max(3, Math.min(22, Math.floor(520 / Math.max(ranks.length, 1))));
    return { left, right, bottom, tall, wide: (this.canvas.clientWidth - left - right) / Math.max(times.length, 1) };
  }

  draw() {
    if (!this.data || !this.data.times.length) return;
    const { times, ranks, cells, late } = this.data;
    const { left, tall, wide, bottom } = this.place();
    this.canvas.style.height = `${ranks.length * tall + bottom}px`;
    const [pen] = drawable(this.canvas);
    const shades = [...Array(11).keys()].map((at) => this.heat(at / 10));
    const paints = Object.fromEntries([..."ABCDEFGHIJK"].map((letter, at) => [letter, shades[at]]));
    for (const letter of "pws") paints[letter] = tone(letter);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const every = Math.ceil(14 / tall);
    ranks.forEach((rank, row) => {
      const line = cells[row], top = row * tall;
      let at = 0;
      while (at < line.length) {
        let end = at + 1;
        while (end < line.length && line[end] === line[at]) end++;
        if (paints[line[at]]) {
          pen.fillStyle = paints[line[at]];
          pen.fillRect(left + at * wide, top, (end - at) * wide + 0.4, Math.max(tall - (tall > 6 ? 1 : 0), 1));
        }
        at = end;
      }
      if (row % every === 0) {
        pen.fillStyle = colour("quiet");
        pen.textAlign = "right";
        pen.fillText(`rank ${rank}`, left - 6, top + tall / 2);
      }
    });
    pen.fillStyle = colour("ink");
    late.forEach((rank, at) => {
      const row = rank === null ? -1 : ranks.indexOf(rank);
      if (row < 0) return;
      pen.beginPath();
      pen.arc(left + (at + 0.5) * wide, row * tall + tall / 2, Math.max(1, Math.min(2.2, wide / 2, tall / 3)), 0, 7);
      pen.fill();
    });
    pen.fillStyle = colour("quiet");
    pen.textAlign = "center";
    const count = Math.max(1, Math.floor((wide * times.length) / 90));
    const places = new Set([...Array(count + 1).keys()].map((number) => Math.round((number / count) * (times.length - 1))));
    for (const at of places) {
      const x = Math.min(Math.max(left + (at + 0.5) * wide, left + 24), this.canvas.clientWidth - 28);
      pen.fillText(clock(times[at]), x, ranks.length * tall + 11);
    }
    const marked = this.zoom.marked;
    if (marked) {
      pen.fillStyle = colour("select");
      pen.fillRect(marked[0], 0, marked[1] - marked[0], ranks.length * tall);
    }
  }

  hover(event) {
    if (!this.data || !this.data.times.length) return;
    this.draw();
    if (this.zoom.marked) return tip(event, null);
    const { times, ranks, cells, late, labels } = this.data;
    const { left, tall, wide } = this.place();
    const at = Math.floor((event.offsetX - left) / wide), row = Math.floor(event.offsetY / tall);
    if (at < 0 || at >= times.length || row < 0 || row >= ranks.length) return tip(event, null);
    const letter = cells[row][at] || ".", share = shareOf(letter);
    const state = share === null ? WORDS[letter] : `waits ${percent(share)} of its time`;
    const lateText = late[at] === null ? "" : late[at] === ranks[row] ? "the others wait for it" : `it waits for rank ${late[at]}`;
    tip(event, [`${when(times[at])}:${clock(times[at]).slice(-2)}`, `rank ${ranks[row]} ${labels[ranks[row]] || ""}: ${state}`, ...(lateText ? [lateText] : [])]);
  }

  showMarks() {
    const marks = [...this.data.marks].reverse();
    fill(this.marks, marks.length ? marks.map((event) => el("li", { class: event.kind }, el("time", { text: clock(event.time) }), el("b", { text: event.kind }), el("span", { text: event.text || (event.rank === null ? "" : `rank ${event.rank}`) }))) : el("li", { class: "quiet", text: "none" }));
  }

  showTable() {
    const state = this.source.state.runs.get(this.run)?.state;
    const over = state && state !== "running" && state !== "unknown";
    setText(this.when, over ? "at its end" : "now");
    const rows = [...this.source.state.ranks].map(([number, rank]) => {
      const late = this.source.state.runs.get(this.run)?.slow.some((slow) => String(slow.rank) === number);
      const sign = over ? "" : rank.collective_age !== null ? `${span(rank.collective_age)} in a collective` : rank.beat_age === null ? "" : `${span(rank.beat_age)} ago`;
      const code = rank.exit_code === null ? "" : ` (${rank.exit_code})`;
      return el("tr", { class: late || rank.state === "failed" ? "wrong" : null }, [number, rank.label || rank.host, rank.state + code, rank.step ?? "", rank.step_s === null ? "" : span(rank.step_s), rank.waiting === null ? "" : percent(rank.waiting), rank.phase, sign, rank.memory === null ? "" : bytes(rank.memory)].map((text) => el("td", { text: String(text) })));
    });
    fill(this.table, rows.length ? el("table", { class: "tight" }, el("thead", {}, el("tr", {}, HEADS.map((text) => el("th", { text })))), el("tbody", {}, rows)) : el("p", { class: "quiet", text: "no rank has started" }));
  }

  changed(state, changed) {
    if (changed.ranks || changed.runs) this.showTable();
    if (changed.ranks || changed.runs || changed.gone || !this.range) this.load();
  }

  redraw() {
    fill(this.legend, this.keys());
    this.draw();
  }
}

// Selects a range of times: a saved file has the whole timeline.
function within(data, range) {
  if (!range) return data;
  const inside = [...data.times.keys()].filter((at) => data.times[at] >= range[0] && data.times[at] <= range[1]);
  return { ...data, times: inside.map((at) => data.times[at]), cells: data.cells.map((row) => inside.map((at) => row[at]).join("")), late: inside.map((at) => data.late[at]) };
}

function joined(known, fresh) {
  if (!fresh.times.length) return { ...known, marks: known.marks.concat(fresh.marks.filter((mark) => !known.marks.some((old) => old.time === mark.time && old.kind === mark.kind))) };
  const ranks = [...new Set([...known.ranks, ...fresh.ranks])].sort((a, b) => a - b);
  const line = (data, rank) => data.cells[data.ranks.indexOf(rank)] || ".".repeat(data.times.length);
  const marks = known.marks.concat(fresh.marks.filter((mark) => !known.marks.some((old) => old.time === mark.time && old.kind === mark.kind && old.text === mark.text)));
  return { times: known.times.concat(fresh.times), ranks, cells: ranks.map((rank) => line(known, rank) + line(fresh, rank)), late: known.late.concat(fresh.late), marks, labels: { ...known.labels, ...fresh.labels } };
}
