// @ts-check
// Messages in the language of the page: t("attention.title", {layer: 2}).
import { signal } from "./html.js";
import { state } from "./state.js";

/** @type {Record<string, Record<string, string>>} */
const loaded = /** @type {any} */ (globalThis).clearheadMessages ?? {};
const version = signal(0);
export const LANGUAGES = ["en", "zh"];

/** Load the messages of a language. */
export async function load(language) {
  if (!LANGUAGES.includes(language)) language = "en";
  if (!loaded[language]) loaded[language] = await (await fetch(`page/messages/${language}.json`)).json();
  document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
  version.value = version.peek() + 1; // not a dependency of the effect that calls this
  return loaded[language];
}

export const messages = loaded;

/** The message of a key with its values; numbers are written with `number`. */
export function t(key, values = {}) {
  void version.value;
  const text = loaded[state.language.value]?.[key] ?? loaded.en?.[key] ?? key;
  return text.replace(/\{(\w+)\}/g, (_, name) => String(values[name] ?? ""));
}

/** A number with some digits after the point, with a true minus sign. */
export function number(x, digits = 3) {
  if (x === null || x === undefined || !Number.isFinite(x)) return x === Infinity ? "∞" : x === -Infinity ? "−∞" : "–";
  return x.toFixed(digits).replace("-", "−");
}

/** A share as a percentage; only all is 100%, and only nothing is 0%. */
export function percent(x, digits = 1) {
  if (x === null || x === undefined) return "–";
  const text = number(100 * x, digits), least = 10 ** -digits;
  if (x > 0 && +text === 0) return `<${number(least, digits)}%`;
  return x < 1 && +text === 100 ? `>${number(100 - least, digits)}%` : `${text}%`;
}

/** A count with a separator of thousands. */
export function count(x) {
  return Math.round(x).toString().replace(/\B(?=(\d{3})+$)/g, ",");
}

/** Bytes in the nearest unit. */
export function bytes(x) {
  const units = ["B", "kB", "MB", "GB"];
  let unit = 0;
  while (x >= 1000 && unit < 3) [x, unit] = [x / 1000, unit + 1];
  return `${unit && x < 100 ? x.toFixed(1) : Math.round(x)} ${units[unit]}`;
}

/** A token for the eye: spaces and line ends are shown. */
export function visible(piece) {
  const control = (x) => `\\x${x.charCodeAt(0).toString(16).padStart(2, "0")}`;
  return piece.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/\p{Cc}/gu, control).replace(/^ +| +$/g, (x) => "·".repeat(x.length)) || "∅";
}
