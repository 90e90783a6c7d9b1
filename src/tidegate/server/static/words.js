// Numbers as people read them.

export function percent(part) {
  const value = part * 100;
  return `${trimmed(value, value > 99 || value < 1 ? 1 : 0)} %`;
}

export function count(value) {
  return Math.round(value).toLocaleString("en-GB");
}

// In thousands or millions where that is short enough.
export function compact(value) {
  if (value < 10_000) return count(value);
  const [unit, name] = value < 1_000_000 ? [1000, "k"] : [1_000_000, "M"];
  return `${trimmed(value / unit, value < 100 * unit ? 1 : 0)}\u00a0${name}`;
}

export function rate(value) {
  return value >= 100 ? count(value) : trimmed(value, value >= 10 ? 1 : 2);
}

export function duration(seconds) {
  const ms = seconds * 1000;
  if (ms < 1000) return ms === 0 ? "0" : `${trimmed(ms, ms < 1 ? 2 : ms < 10 ? 1 : 0)} ms`;
  return `${trimmed(seconds, seconds < 10 ? 2 : 1)} s`;
}

function trimmed(value, digits) {
  return String(Number(value.toFixed(digits)));
}
