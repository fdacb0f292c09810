// @ts-check
// Tour: fifteen questions about Transformers; guess first, then the answer is measured on the live model.
import { html, useEffect, useState } from "../html.js";
import { state, model, models, go, textOf, kindsOf } from "../state.js";
import { post } from "../api.js";
import { t, number, percent, visible, count } from "../i18n.js";
import { View as Frame, Waiting } from "../parts.js";
import { selection } from "../side.js";

/** @typedef {{model: string, text: string, target?: string}} Body */
const sum = (x) => Array.from(x).reduce((a, b) => a + b, 0);
const spread = (x) => {
  const mean = sum(x) / x.length;
  return Math.sqrt(Array.from(x).reduce((a, b) => a + (b - mean) ** 2, 0) / x.length);
};
const firstHead = (m) => ({ kind: kindsOf(m.config)[0], layer: 0, head: 0 });

/**
 * The stops: the families they need, the view that shows them, the right answer (a, b or c), and a measurement whose
 * values stand in the answer. @type {{id: string, families: string[], view: string, place?: any, right: string, measure: (body: Body, m: any) => Promise<Record<string, any>>}[]}
 */
export const STOPS = [
  { id: "tokens", families: ["encoder-decoder", "decoder", "encoder"], view: "tokens", right: "b", measure: async (body) => {
    const { header } = await post("trace", body), side = header.source ?? header.target;
    return { tokens: side.ids.length, characters: [...side.texts[0]].length };
  } },
  { id: "embedding", families: ["encoder", "decoder", "encoder-decoder"], view: "tokens", right: "c", measure: async (body) => {
    const chinese = /[\u3400-\u9fff]/.test(body.text);
    const [word, text, others] = chinese ? ["打", "他在打电话。", ["孩子们打篮球。"]] : ["bank", "They sat on the bank of the river.", ["She opened an account at the bank."]];
    const { tensors } = await post("context", { model: body.model, text, others, word });
    return { word, fixed: number(tensors.static_cosines.data[1], 3), cosine: number(tensors.cosines.data[1], 3) };
  } },
  { id: "positions", families: ["encoder-decoder", "decoder", "encoder"], view: "switches", right: "a", measure: async (body, m) => {
    const stack = m.family === "decoder" ? "decoder" : "encoder";
    const { header } = await post("switch", { ...body, off: [{ part: "positions", stack, layer: 0, head: 0 }] });
    return { change: number(header.effect.divergence, 2), changed: percent(header.effect.changed, 0) };
  } },
  { id: "query", families: ["decoder", "encoder-decoder", "encoder"], view: "steps", place: { step: "scores" }, right: "b", measure: async (body, m) => {
    const { tensors } = await post("steps", { ...body, ...firstHead(m) }), [, columns] = tensors.scores.shape;
    const row = tensors.scores.shape[0] - 1, q = tensors.q.data.subarray(row * tensors.q.shape[1]), k = tensors.k.data.subarray(0, tensors.k.shape[1]);
    return { row: row + 1, score: number(tensors.scores.data[row * columns], 3), sum: number(sum(Array.from(k, (x, i) => x * q[i])), 3), size: k.length };
  } },
  { id: "scale", families: ["decoder", "encoder-decoder", "encoder"], view: "steps", place: { step: "scaled" }, right: "c", measure: async (body, m) => {
    const { tensors, header } = await post("steps", { ...body, ...firstHead(m) });
    return { before: number(spread(tensors.scores.data), 2), after: number(spread(tensors.scaled.data), 2), root: number(Math.sqrt(header.head_dim), 2) };
  } },
  { id: "softmax", families: ["encoder-decoder", "decoder", "encoder"], view: "attention", right: "a", measure: async (body, m) => {
    const { tensors } = await post("steps", { ...body, ...firstHead(m) }), [rows, columns] = tensors.weights.shape;
    const sums = Array.from({ length: rows }, (_, r) => sum(tensors.weights.data.subarray(r * columns, (r + 1) * columns)));
    return { low: number(Math.min(...sums), 4), high: number(Math.max(...sums), 4), rows };
  } },
  { id: "mask", families: ["decoder", "encoder-decoder"], view: "steps", place: { kind: "decoder", step: "mask" }, right: "a", measure: async (body) => {
    const { tensors } = await post("steps", { ...body, kind: "decoder", layer: 0, head: 0 }), [rows, columns] = tensors.weights.shape;
    let most = 0;
    for (let r = 0; r < rows; r++) for (let c = r + 1; c < columns; c++) most = Math.max(most, tensors.weights.data[r * columns + c]);
    return { most: String(most), cells: (rows * (rows - 1)) / 2 };
  } },
  { id: "heads", families: ["encoder-decoder", "decoder", "encoder"], view: "switches", right: "b", measure: async (body) => {
    const { header } = await post("effects", { ...body, group: "heads" });
    return { idle: header.effects.filter((e) => e.divergence < 0.01).length, of: header.effects.length, most: number(header.effects[0].divergence, 3) };
  } },
  { id: "explanation", families: ["decoder", "encoder-decoder", "encoder"], view: "attention", right: "c", measure: async (body, m) => {
    const [{ tensors }, { header }] = await Promise.all([post("trace", body), post("effects", { ...body, group: "heads" })]);
    const kind = kindsOf(m.config)[0], [layers, heads, rows, columns] = tensors[kind].shape;
    let best = { layer: 0, head: 0, share: 0 };
    for (let i = 0; i < layers * heads; i++) {
      let peak = 0;
      for (let r = 1; r < rows; r++) peak += Math.max(...tensors[kind].data.subarray(i * rows * columns + r * columns, i * rows * columns + (r + 1) * columns)) / 255 / (rows - 1);
      if (peak > best.share) best = { layer: Math.floor(i / heads), head: i % heads, share: peak };
    }
    const rank = header.effects.findIndex((e) => e.stack === kind && e.layer === best.layer && e.head === best.head);
    return { layer: best.layer + 1, head: best.head + 1, share: percent(best.share, 0), rank: rank + 1, of: header.effects.length, change: number(header.effects[rank]?.divergence, 4) };
  } },
  { id: "residual", families: ["decoder", "encoder-decoder", "encoder"], view: "steps", place: { step: "sum" }, right: "b", measure: async (body, m) => {
    const { tensors, header } = await post("layer", { ...body, kind: kindsOf(m.config)[0], layer: 0 }), [layers, tokens] = tensors.x.shape, at = (layers - 1) * tokens + tokens - 1;
    return { layer: header.layers, stream: number(tensors.x.data[at], 2), attention: number(tensors.attention.data[at], 2), feed_forward: number(tensors.feed_forward.data[at], 2) };
  } },
  { id: "feed_forward", families: ["decoder", "encoder", "encoder-decoder"], view: "steps", place: { step: "sum" }, right: "c", measure: async (_, m) => {
    const { dim, heads, kv_heads, head_dim, ff_dim, activation } = m.config;
    const attention = dim * head_dim * (2 * heads + 2 * kv_heads), ff = dim * ff_dim * (/glu/.test(activation) ? 3 : 2);
    return { attention: count(attention), ff: count(ff), share: percent(ff / (ff + attention), 0) };
  } },
  { id: "cross", families: ["encoder-decoder"], view: "translate", place: { step: "align" }, right: "b", measure: async (body) => {
    const { header } = await post("align", body), [source, target] = header.links[1] ?? header.links[0] ?? [0, 0];
    return { target: header.target_words[target] ?? "", source: header.source_words[source] ?? "" };
  } },
  { id: "forcing", families: ["encoder-decoder"], view: "translate", place: { step: "forced" }, right: "a", measure: async (body) => {
    const { header } = await post("forced", body);
    return { forced: number(header.forced_loss, 3), free: number(header.free_loss, 3), cost: number(header.free_loss - header.forced_loss, 3) };
  } },
  { id: "beam", families: ["encoder-decoder"], view: "translate", place: { step: "beam" }, right: "b", measure: async (body) => {
    const { header } = await post("beam", { model: body.model, text: body.text, beam: 4, length_penalty: 1, prefix: [] });
    const [best, second] = header.hypotheses;
    return { best: best.text, score: number(best.score, 3), second: second?.text ?? "–", other: number(second?.score, 3), nodes: header.nodes.length };
  } },
  { id: "cache", families: ["decoder", "encoder-decoder"], view: "next", right: "c", measure: async (body) => {
    const trace = await post("trace", body), { header } = await post("next", { ...body, position: trace.header.target.ids.length - 1 });
    return { tokens: header.cache.tokens, times: number(header.cache.uncached_flops / header.cache.step_flops, 1), token: visible(header.texts[0]) };
  } },
];

/** A model of one of the families, the shown one if it fits, and its text. @returns {[any, Body] | null} */
function modelFor(families) {
  if (families.includes(model.value.family) && state.text.value.trim()) return [model.value, textOf()];
  for (const family of families) {
    const found = models.value.find((each) => each.family === family && each.tokenizer);
    if (found) return [found, { model: found.name, text: found.example }];
  }
  return null;
}

export function View() {
  const number_ = Math.min(Math.max(state.stop.value ?? 0, 0), STOPS.length - 1), stop = STOPS[number_];
  useEffect(() => {
    selection.value = { side: html`<h3>${t("tour.side")}</h3><ol class="stops">${STOPS.map((each, i) => html`<li><button type="button" class="link" aria-current=${i === number_ ? "step" : null} onClick=${() => (state.stop.value = i)}>${t(`tour.${each.id}.title`)}</button></li>`)}</ol>` };
    return () => { selection.value = null; };
  }, [number_, state.language.value]);
  const step = (by) => (state.stop.value = Math.min(Math.max(number_ + by, 0), STOPS.length - 1));
  return html`<${Frame} title=${t(`tour.${stop.id}.title`)} lead=${t("tour.progress", { number: number_ + 1, of: STOPS.length })}>
    <${Stop} key=${stop.id} stop=${stop} />
    <p class="walk"><button type="button" class="small" disabled=${number_ === 0} onClick=${() => step(-1)}>${t("tour.back")}</button>
    <button type="button" class="small" disabled=${number_ === STOPS.length - 1} onClick=${() => step(1)}>${t("tour.next")}</button></p></${Frame}>`;
}

function Stop({ stop }) {
  const [guess, setGuess] = useState(/** @type {string | null} */ (null));
  const [found, setFound] = useState(/** @type {any} */ (null));
  const [error, setError] = useState(/** @type {any} */ (null));
  const chosen = modelFor(stop.families);
  useEffect(() => {
    if (!guess || !chosen) return;
    stop.measure(chosen[1], chosen[0]).then(setFound, setError);
  }, [guess]);
  const see = () => {
    if (!chosen) return;
    const [m, body] = chosen;
    if (m !== model.value) {
      state.model.value = m.name;
      state.target.value = null;
      state.appended.value = [];
      state.off.value = [];
      state.text.value = body.text;
    }
    go({ view: stop.view, kind: "", layer: null, head: null, ...(stop.view === "steps" ? { layer: 0, head: 0 } : {}), ...stop.place });
  };
  return html`<p class="question">${t(`tour.${stop.id}.question`)}</p>
    <div class="guesses" role="group" aria-label=${t("tour.guess")}>${["a", "b", "c"].map((each) => html`<button type="button" class=${guess ? (each === stop.right ? "guess right" : each === guess ? "guess wrong" : "guess") : "guess"} aria-pressed=${guess === each} onClick=${() => setGuess(each)}>
      ${t(`tour.${stop.id}.${each}`)}${guess && each === stop.right ? html`<span class="mark-right"> ✓ ${t("tour.right")}</span>` : ""}</button>`)}</div>
    <div aria-live="polite">${guess && html`<div class="answer"><p>${t(`tour.${stop.id}.answer`)}</p>
      ${!chosen ? html`<p class="note">${t("tour.needs", { families: stop.families.map((each) => t(`family.${each}`)).join(", ") })}</p>`
        : error ? html`<${Waiting} error=${error} />` : found ? html`<p class="measured" data-values=${JSON.stringify(found)}><span class="note">${t("tour.measured", { model: chosen[0].name })}</span>${t(`tour.${stop.id}.live`, found)}</p>` : html`<${Waiting} error=${null} />`}
      ${chosen && html`<button type="button" class="small" onClick=${see}>${t("tour.see", { view: t(`view.${stop.view}`) })}</button>`}</div>`}</div>`;
}
