// Numbers and times as text.

export function short(value) {
  if (value === null || value === undefined) return "n/a";
  if (typeof value === "string") return value;
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e4) return String(value);
  for (const [limit, unit, divisor] of [[1e12, "T", 1e12], [1e9, "G", 1e9], [1e6, "M", 1e6], [1e4, "K", 1e3]]) {
    if (size >= limit) return `${Number((value / divisor).toPrecision(3))}${unit}`;
  }
  if (size >= 100) return value.toFixed(1);
  if (size >= 0.001 || size === 0) return String(Number(value.toPrecision(4)));
  return value.toExponential(1);
}

export function bytes(value) {
  if (typeof value !== "number") return "n/a";
  for (const [limit, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "KB"]]) {
    if (value >= limit) return `${Number((value / limit).toPrecision(3))} ${unit}`;
  }
  return `${Math.round(value)} B`;
}

export function percent(value) {
  return typeof value === "number" ? `${Math.round(value * 100)} %` : "n/a";
}

export function span(seconds) {
  if (typeof seconds !== "number") return "n/a";
  if (seconds > 0 && seconds < 0.1) return `${Number((seconds * 1000).toPrecision(2))} ms`;
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return seconds < 10 ? `${Number(seconds.toFixed(1))} s` : `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

export function when(time) {
  if (!time) return "n/a";
  const date = new Date(time * 1000), two = (n) => String(n).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${two(date.getHours())}:${two(date.getMinutes())}`;
}

export function clock(time) {
  const date = new Date(time * 1000), two = (n) => String(n).padStart(2, "0");
  return `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

export function counted(count, noun) {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
}
