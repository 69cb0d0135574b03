// Numbers as people read them.

const whole = new Intl.NumberFormat("en");

export const count = (n) => whole.format(Math.round(n));

export const plural = (n, word) => `${count(n)} ${word}${Math.round(n) === 1 ? "" : "s"}`;

export function seconds(s) {
  if (s === null || s === undefined) return "–";
  if (s < 1) return `${Math.round(1000 * s)} ms`;
  if (s < 100) return `${s.toFixed(s < 10 ? 2 : 1)} s`;
  return `${Math.floor(s / 60)} min ${Math.round(s % 60)} s`;
}

export function rate(perSecond) {
  if (!Number.isFinite(perSecond)) return "–";
  return perSecond < 100 ? perSecond.toFixed(1) : count(perSecond);
}

export function bytes(n) {
  if (n < 1024) return `${count(n)} B`;
  let unit = -1;
  do {
    n /= 1024;
    unit += 1;
  } while (n >= 1023.5 && unit < 3);
  return `${n < 10 ? n.toFixed(1) : count(n)} ${["KiB", "MiB", "GiB", "TiB"][unit]}`;
}

export function ago(s) {
  if (s < 5) return "just now";
  if (s < 60) return `${Math.floor(s)} s ago`;
  if (s < 3600) return `${Math.floor(s / 60)} min ago`;
  return `${Math.floor(s / 3600)} h ago`;
}
