// Numbers and texts for people. Everything that comes from elsewhere goes through `clean`.

const UNSEEN = /[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;

/** The text with characters that can't be seen, or that turn others around, written as escapes. */
export function clean(text) {
  return String(text).replace(UNSEEN, (char) => `\\u${char.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

export function seconds(value) {
  if (value === undefined || value === null) return "–";
  if (value < 1) return "now";
  if (value < 100) return `${Math.round(value)} s`;
  if (value < 6000) return `${Math.round(value / 60)} min`;
  if (value < 172800) return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)}`;
  return `${Math.round(value / 86400)} d`;
}

export function count(value) {
  if (value < 10000) return String(Math.round(value));
  if (value < 1e6) return `${(value / 1000).toFixed(value < 1e5 ? 1 : 0)} k`;
  return `${(value / 1e6).toFixed(1)} M`;
}

export function rate(value) {
  return value === undefined ? "–" : value < 10 && value > 0 ? value.toFixed(1) : count(value);
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) [value, unit] = [value / 1024, unit + 1];
  return `${value < 10 && unit ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

export function className(state) {
  return state.replace(/[^a-z]+/g, "-");
}
