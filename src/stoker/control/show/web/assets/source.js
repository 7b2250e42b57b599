// Sources of the page's data: the live server, or a saved file that contains everything.

const PARTS = ["runs", "hosts", "gpus", "ranks"];
const MAX_VALUES = 60; // of a sparkline

function blank() {
  return { time: 0, root: "", others: 0, interval: 2, problems: [], connected: false, got: 0, runs: new Map(), hosts: new Map(), gpus: new Map(), ranks: new Map(), recent: new Map() };
}

export class LiveSource {
  constructor(changed) {
    this.live = true;
    this.state = blank();
    this.changed = changed;
    this.run = "";
    this.stream = null;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.close() : this.open()));
  }

  watch(run) {
    if (this.stream && this.run === run) return;
    this.run = run;
    this.close();
    this.open();
  }

  open() {
    if (this.stream || document.hidden) return;
    const stream = new EventSource(`events?run=${encodeURIComponent(this.run)}`);
    this.stream = stream;
    stream.onmessage = (event) => {
      if (stream === this.stream) this.take(JSON.parse(event.data));
    };
    stream.onerror = () => {
      this.state.connected = false;
      this.changed(this.state, {});
    };
  }

  close() {
    if (this.stream) this.stream.close();
    this.stream = null;
  }

  take(message) {
    const state = this.state;
    const changed = {};
    if (message.whole) {
      for (const part of PARTS) state[part] = new Map();
      Object.assign(state, { root: message.root, others: message.others, interval: message.interval });
      state.recent = new Map(Object.entries(message.recent));
    }
    for (const [part, rows] of Object.entries(message.set || {})) {
      for (const [key, row] of Object.entries(rows)) {
        const known = state[part].get(key);
        state[part].set(key, known ? Object.assign(known, row) : row);
      }
      changed[part] = new Set(Object.keys(rows));
    }
    for (const [part, keys] of Object.entries(message.gone || {})) {
      for (const key of keys) state[part].delete(key);
      changed[part] = changed[part] || new Set();
      changed.gone = true;
    }
    if (!message.whole) {
      for (const [key, card] of state.gpus) {
        const values = state.recent.get(key) || [];
        values.push(card.utilization);
        state.recent.set(key, values.slice(-MAX_VALUES));
      }
    }
    Object.assign(state, { time: message.time, problems: message.problems, connected: true, got: performance.now() });
    this.changed(state, changed);
  }

  async ask(path, params = {}) {
    const query = new URLSearchParams();
    for (const [name, value] of Object.entries(params)) {
      if (value !== null && value !== undefined && value !== "") query.set(name, Array.isArray(value) ? value.join("\n") : value);
    }
    const answer = await retry(() => fetch(`api/${path}?${query}`, { cache: "no-store" }));
    const data = await answer.json().catch(() => ({ error: `the server answered with status ${answer.status}` }));
    if (data.error) throw new Error(data.error);
    return data;
  }

  file(run, path) {
    return `file?${new URLSearchParams({ run, path })}`;
  }

  async stop(run) {
    const answer = await fetch("api/stop", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ run }),
    });
    const data = await answer.json().catch(() => ({ error: `the server answered with status ${answer.status}` }));
    return data.error || data.told;
  }
}

// Retries a request: browsers abort requests, even to loopback, when a network interface appears or disappears (VPN, container).
async function retry(attempt, waits = [300, 1000, 3000]) {
  for (const wait of waits) {
    try {
      return await attempt();
    } catch {
      await new Promise((resolve) => setTimeout(resolve, wait));
    }
  }
  return attempt();
}

export class SavedSource {
  constructor(data, changed) {
    this.live = false;
    this.data = data;
    this.state = blank();
    this.changed = changed;
    const state = this.state;
    for (const part of PARTS) state[part] = new Map(Object.entries(data.state[part] || {}));
    Object.assign(state, { time: data.time, connected: true });
  }

  watch() {}

  async ask(path, params = {}) {
    if (path === "curves") return this.curves(params);
    if (path === "log") return this.log(params);
    const data = this.data.answers[path === "rows" ? `rows:${params.path}` : path];
    if (!data) throw new Error("the saved file does not contain this");
    return data;
  }

  curves({ names, first, last, smooth }) {
    const curves = {};
    for (const name of names || []) {
      const saved = this.data.answers.curves.curves[name];
      if (!saved) continue;
      let { steps, values } = saved;
      if (smooth > 1) [steps, values] = averaged(steps, values, Math.max(1, Math.round((smooth * steps.length) / Math.max(saved.count, 1))));
      const inside = [...steps.keys()].filter((at) => !(steps[at] < first) && !(steps[at] > last));
      curves[name] = { steps: inside.map((at) => steps[at]), values: inside.map((at) => values[at]), count: saved.count, bad: saved.bad, all: saved.all };
    }
    const { names: allNames, interval } = this.data.answers.curves;
    return { names: allNames, curves, interval, problem: "" };
  }

  log({ rank, attempt, find }) {
    const answer = this.data.answers.logs[rank === "stoker" ? "stoker" : `${attempt ?? this.data.answers.logs.attempt}/${rank}`];
    const choices = { attempts: this.data.answers.logs.attempts, attempt: attempt ?? this.data.answers.logs.attempt, ranks: this.data.answers.logs.ranks };
    if (!answer) return { ...choices, text: "", begin: 0, end: 0, size: 0 };
    if (!find) return { ...choices, ...answer };
    const lines = answer.text.split("\n").filter((line) => line.toLowerCase().includes(find.toLowerCase()));
    return { count: lines.length, matches: lines.slice(-300).map((text) => ({ at: null, text })), searched: answer.text.length, size: answer.size };
  }

  file() {
    return null;
  }
}

function averaged(steps, values, window) {
  const known = [...steps.keys()].filter((at) => typeof values[at] === "number");
  const means = [];
  let total = 0;
  known.forEach((at, number) => {
    total += values[at] - (number >= window ? values[known[number - window]] : 0);
    means.push(total / Math.min(number + 1, window));
  });
  return [known.map((at) => steps[at]), means];
}
