// @ts-check
// Next token: the distribution with live temperature, top-k, top-p and min-p; the logit lens; what the KV cache holds.
import { html, useEffect, useMemo, useState } from "../html.js";
import { state, textOf, model, go } from "../state.js";
import { useFrame } from "../api.js";
import { t, number, percent, visible, bytes, count } from "../i18n.js";
import { Bar, Caption, Facts, Numbers, Slider, View as Frame, Waiting, labelsOf } from "../parts.js";
import { selection } from "../side.js";
import { filterLogits, softmax } from "../sampling.js";

const SHOWN = 14;
const START = { temperature: 1, top_k: 0, top_p: 1, min_p: 0 };

/** Take a token: it follows the text, or the target up to this position. */
function take(id, side, position) {
  if (model.value.family === "encoder-decoder") {
    state.target.value = "";
    state.appended.value = [...side.ids.slice(1, position + 1), id];
  } else state.appended.value = position === side.ids.length - 1 ? [...state.appended.value, id] : state.appended.value;
  go({});
}

export function View() {
  const empty = !state.text.value.trim();
  const trace = useFrame("trace", empty ? null : textOf());
  const side = trace.frame?.header.target;
  const last = side ? side.ids.length - 1 : null;
  const position = last === null ? null : Math.min(state.row.value ?? last, last);
  const { frame, error, stale } = useFrame("next", empty || position === null ? null : { ...textOf(), position });
  const [how, setHow] = useState(START);
  useEffect(() => {
    selection.value = { step: "sampling", cell: frame && html`<${Chances} frame=${frame} how=${how} />`, more: html`<${CacheFacts} cache=${frame?.header.cache} />` };
    return () => { selection.value = null; };
  }, [frame, how, state.language.value]);
  if (empty) return html`<${Frame} title=${t("view.next")}><p class="problem" role="alert">${t("error.empty")}</p></${Frame}>`;
  if (!frame || !side) return html`<${Frame} title=${t("view.next")}><${Waiting} error=${error ?? trace.error} /></${Frame}>`;
  const labels = labelsOf(side);
  const here = Math.min(frame.header.position, labels.length - 1);
  const undo = state.appended.value.length > 0;
  const whole = model.value.family === "decoder" && here < labels.length - 1;
  return html`<${Frame} title=${t("view.next")} lead=${t("next.lead")}>
    <div class="strip" role="group" aria-label=${t("next.positions")}>${labels.map((label, i) => html`<button type="button" class=${`token ${side.spans[i] ? "" : "special"} ${i > here ? "later" : ""}`} aria-pressed=${i === here} onClick=${() => go({ row: i })}><span class="piece">${label}</span></button>`)}
      ${undo && html`<button type="button" class="small" onClick=${() => { state.appended.value = state.appended.value.slice(0, -1); go({}); }}>${t("next.undo")}</button>`}</div>
    <div class=${stale ? "next stale" : "next"}><div><h3>${t("next.after", { token: labels[here] })}</h3>
      <${Distribution} frame=${frame} how=${how} onTake=${whole ? null : (id) => take(id, side, here)} /></div>
      <${Controls} how=${how} onChange=${setHow} vocabulary=${frame.tensors.logits.shape[0]} /></div>
    <${Lens} lens=${frame.header.lens} />
  </${Frame}>`;
}

function Controls({ how, onChange, vocabulary }) {
  const set = (name) => (value) => onChange({ ...how, [name]: value });
  return html`<div class="controls"><h3>${t("next.sampling")}</h3>
    <${Slider} label=${t("next.temperature")} min="0.05" max="3" step="0.05" value=${how.temperature} onInput=${set("temperature")} show=${(x) => number(x, 2)} />
    <${Slider} label="top-k" min="0" max=${Math.min(100, vocabulary)} step="1" value=${how.top_k} onInput=${set("top_k")} show=${(x) => (x === 0 ? t("off") : String(x))} />
    <${Slider} label="top-p" min="0.05" max="1" step="0.01" value=${how.top_p} onInput=${set("top_p")} show=${(x) => (x >= 1 ? t("off") : number(x, 2))} />
    <${Slider} label="min-p" min="0" max="0.5" step="0.01" value=${how.min_p} onInput=${set("min_p")} show=${(x) => (x === 0 ? t("off") : number(x, 2))} />
    <button type="button" class="small" onClick=${() => onChange(START)}>${t("reset")}</button></div>`;
}

function Distribution({ frame, how, onTake }) {
  const { ids, texts, eos } = frame.header;
  const { before, after, kept, entropy } = useMemo(() => {
    const before = softmax(frame.tensors.logits.data), after = softmax(filterLogits(frame.tensors.logits.data, how));
    let kept = 0, entropy = 0;
    for (const p of after) if (p > 0) [kept, entropy] = [kept + 1, entropy - p * Math.log2(p)];
    return { before, after, kept, entropy };
  }, [frame, how]);
  const names = new Map(ids.map((id, i) => [id, texts[i]]));
  const most = Math.max(before[ids[0]], after[ids[0]]);
  const row = (id) => html`<li key=${id} class=${after[id] === 0 ? "cut" : ""}>
    <button type="button" class="piece take" disabled=${!onTake || eos.includes(id)} onClick=${() => onTake(id)} aria-label=${t("next.take", { token: names.get(id) })}>${visible(names.get(id))}</button>
    <span class="two"><${Bar} value=${after[id] / most} label=${percent(after[id])} /><span class="ghost"><span style=${{ width: `${(before[id] / most) * 100}%` }}></span></span></span>
    <span class="num" data-id=${id}>${after[id] === 0 ? t("next.cut") : percent(after[id], 2)}</span></li>`;
  return html`<ol class="best distribution">${ids.slice(0, SHOWN).map(row)}</ol>
    <p class="note">${t("next.bars")}</p>
    <${Caption} live=${true}>${t("next.caption", { kept: count(kept), of: count(before.length), entropy: number(entropy, 2), choices: number(2 ** entropy, 1) })}</${Caption}>
    <${Numbers} title=${t("next.table")} head=${[t("token"), t("id"), t("next.logit"), t("next.before"), t("next.after_cut")]}
      rows=${ids.slice(0, 100).map((id) => [visible(names.get(id)), `${id}`, frame.tensors.logits.data[id], number(before[id], 5), number(after[id], 5)])} />`;
}

function Lens({ lens }) {
  const final = lens[lens.length - 1]?.ids[0];
  const first = lens.findIndex((_, i) => lens.slice(i).every((each) => each.ids[0] === final));
  return html`<h3>${t("lens.title")}</h3><p class="note">${t("lens.note")}</p>
    <div class="scroll" tabindex="0" role="region" aria-label=${t("lens.title")}><table class="lens"><thead><tr><th scope="col">${t("lens.layer")}</th>${[1, 2, 3, 4, 5].map((i) => html`<th scope="col">${i}</th>`)}</tr></thead>
    <tbody>${lens.map((each, layer) => html`<tr><th scope="row">${layer + 1}</th>${each.texts.map((text, i) => html`<td class=${each.ids[i] === final ? "final" : ""}><span class="piece">${visible(text)}</span> <small>${percent(Math.exp(each.logprobs[i]), 0)}</small></td>`)}</tr>`)}</tbody></table></div>
    ${first >= 0 && html`<${Caption}>${t("lens.caption", { layer: first + 1, token: visible(lens[lens.length - 1].texts[0]) })}</${Caption}>`}`;
}

/** From the logit of the best candidate to its probability. */
function Chances({ frame, how }) {
  const z = frame.tensors.logits.data, id = frame.header.ids[0], before = softmax(z), scaled = softmax(Float64Array.from(z, (x) => x / how.temperature)), after = softmax(filterLogits(z, how));
  return html`<${Facts} title=${t("next.best", { token: visible(frame.header.texts[0]) })} rows=${[["z", number(z[id], 4)], ["z / T", number(z[id] / how.temperature, 4)], [t("next.at_one"), number(before[id], 4)], [t("next.at_temperature"), number(scaled[id], 4)], [t("next.after_cut"), number(after[id], 4)]]} />`;
}

function CacheFacts({ cache }) {
  if (!cache) return null;
  const saved = cache.multi_head_bytes - cache.bytes - cache.cross_bytes;
  return html`<h3>${t("cache.title")}</h3><p class="note">${t("cache.note", { tokens: cache.tokens, layers: cache.layers, kv: cache.kv_heads, size: cache.head_dim })}</p>
    <dl class="cache"><dt>${t("cache.own")}</dt><dd>${bytes(cache.bytes)}</dd>
    ${cache.cross_bytes > 0 && html`<dt>${t("cache.cross", { tokens: cache.source_tokens })}</dt><dd>${bytes(cache.cross_bytes)}</dd>`}
    ${saved > 0 && html`<dt>${t("cache.saved", { heads: cache.heads, kv: cache.kv_heads })}</dt><dd>${bytes(saved)}</dd>`}
    <dt>${t("cache.step")}</dt><dd>${number(cache.step_flops / 1e6, 1)} M</dd><dt>${t("cache.without")}</dt><dd>${number(cache.uncached_flops / 1e6, 1)} M</dd></dl>
    <p class="caption">${t("cache.caption", { times: number(cache.uncached_flops / cache.step_flops, 1) })}</p>`;
}
