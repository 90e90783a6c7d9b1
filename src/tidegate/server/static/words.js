// Numbers as people read them.

export function percent(part) {
  const value = part * 100;
  return `${value >= 99.95 || value === 0 ? Math.round(value) : value > 99 || value < 1 ? value.toFixed(1) : Math.round(value)} %`;
}

export function count(value) {
  return Math.round(value).toLocaleString("en-GB");
}

export function rate(value) {
  return value >= 100 ? count(value) : value >= 10 || value === 0 ? value.toFixed(value % 1 ? 1 : 0) : value.toFixed(2).replace(/0$/, "");
}

export function duration(seconds) {
  if (seconds === 0) return "0";
  const ms = seconds * 1000;
  if (ms < 10) return `${ms.toFixed(ms < 1 ? 2 : 1)} ms`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
}
