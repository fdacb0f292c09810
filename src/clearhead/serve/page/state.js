// @ts-check
// The state of the page as signals, kept in the URL: a link reproduces the view.
import { signal, effect, batch, computed } from "./html.js";

/** @typedef {"encoder" | "decoder" | "cross"} Kind */

export const models = signal(/** @type {any[]} */ ([]));
export const state = {
  model: signal(""),
  text: signal(""),
  target: signal(/** @type {string | null} */ (null)), // null: what the model itself writes
  appended: signal(/** @type {number[]} */ ([])),
  view: signal("attention"),
  kind: signal(/** @type {string} */ ("")),
  layer: signal(/** @type {number | null} */ (null)),
  head: signal(/** @type {number | null} */ (null)),
  step: signal(""),
  row: signal(/** @type {number | null} */ (null)),
  column: signal(/** @type {number | null} */ (null)),
  off: signal(/** @type {string[]} */ ([])), // "head.cross.1.3"
  other: signal(""), // the second model of Compare
  stop: signal(0), // of the Tour
  language: signal("en"),
  theme: signal(""), // "": as the system
};

// Short keys of the URL, and how a value is written into it.
const NUMBER = { read: (x) => (x === "" || Number.isNaN(+x) ? null : Math.trunc(+x)), write: String };
const TEXT = { read: (x) => x, write: String };
const LIST = {
  read: (x) => (x ? x.split("~") : []),
  write: (x) => x.join("~"),
};
const NUMBERS = { read: (x) => LIST.read(x).map(Number).filter(Number.isInteger), write: LIST.write };
/** @type {Record<string, [keyof typeof state, any]>} */
const KEYS = {
  m: ["model", TEXT], v: ["view", TEXT], k: ["kind", TEXT], l: ["layer", NUMBER], h: ["head", NUMBER],
  s: ["step", TEXT], r: ["row", NUMBER], c: ["column", NUMBER], off: ["off", LIST], o: ["other", TEXT],
  n: ["stop", NUMBER], a: ["appended", NUMBERS], lang: ["language", TEXT], theme: ["theme", TEXT],
  t: ["text", TEXT], y: ["target", TEXT],
};
const initial = Object.fromEntries(Object.entries(state).map(([name, each]) => [name, each.value]));

const MAX_URL_CHARS = 20000; // a longer text is not kept in the URL; browsers slow down long before their limits

/** Write the state into the part of the URL after #. */
export function toHash() {
  const parts = new URLSearchParams();
  for (const [key, [name, form]] of Object.entries(KEYS)) {
    const value = state[name].value;
    if (typeof value === "string" && value.length > MAX_URL_CHARS) continue;
    if (value !== null && JSON.stringify(value) !== JSON.stringify(initial[name])) parts.set(key, form.write(value));
  }
  return "#" + parts.toString();
}

/** Set the state from a URL; what it does not name gets its first value. */
export function fromHash(hash) {
  const parts = new URLSearchParams(hash.replace(/^#/, ""));
  batch(() => {
    for (const [key, [name, form]] of Object.entries(KEYS)) {
      const given = parts.get(key);
      // @ts-ignore: each signal gets a value of its own type
      if (given !== null) state[name].value = form.read(given.slice(0, MAX_URL_CHARS));
      else if (name !== "language" && name !== "theme") state[name].value = initial[name];
    }
    state.stop.value ??= 0;
  });
}

/** Keep the URL up to date: a new entry of the history for another place, the same entry for details. */
export function followURL() {
  let place = "";
  effect(() => {
    const hash = toHash();
    const now = [state.view, state.model, state.kind, state.layer, state.head].map((each) => each.value).join("/");
    if (hash === location.hash || (hash === "#" && !location.hash)) return void (place = now);
    try {
      if (place && now !== place) history.pushState(null, "", hash);
      else history.replaceState(null, "", hash);
    } catch {
      // a browser limits how often; the next change writes it
    }
    place = now;
  });
  addEventListener("popstate", () => fromHash(location.hash));
}

/** The model that is shown, as /inspect/models describes it. */
export const model = computed(() => models.value.find((each) => each.name === state.model.value) ?? models.value[0]);

/** What a request says about the text. */
export function textOf() {
  const body = { model: model.value?.name ?? "", text: state.text.value };
  if (state.target.value !== null) Object.assign(body, { target: state.target.value });
  if (state.appended.value.length) Object.assign(body, { appended: state.appended.value });
  return body;
}

/** The number of layers with a kind of attention. */
export function depth(config, kind) {
  return kind === "encoder" ? config.encoder_layers : config.decoder_layers;
}

/** The kinds of attention of a family. */
export function kindsOf(config) {
  return { "encoder-decoder": ["encoder", "decoder", "cross"], encoder: ["encoder"], decoder: ["decoder"] }[
    /** @type {"encoder"} */ (config.family)
  ];
}

/** The kind, layer and head that are shown, within the model's bounds; layer and head are null for all of them. */
export const place = computed(() => {
  const config = model.value?.config;
  if (!config) return { kind: "", layer: null, head: null };
  const kinds = kindsOf(config);
  const last = kinds[kinds.length - 1];
  const kind = kinds.includes(state.kind.value) ? state.kind.value : last;
  const bound = (value, count) =>
    value === null ? null : Math.min(Math.max(value, 0), count - 1);
  const layer = bound(state.layer.value, depth(config, kind));
  return { kind, layer, head: layer === null ? null : bound(state.head.value, config.heads) };
});

/** Go to a place in the model. */
export function go(to) {
  batch(() => {
    if (!("row" in to)) Object.assign(to, { row: null, column: null });
    for (const [name, value] of Object.entries(to)) /** @type {any} */ (state)[name].value = value;
  });
}
