// @ts-check
// Attention: all heads as small pictures, one layer, or one head with what changes when it is switched off.
import { html, useEffect, useMemo, useState } from "../html.js";
import { state, place, go, textOf, model, kindsOf, depth } from "../state.js";
import { post, useFrame } from "../api.js";
import { t, number, percent, visible } from "../i18n.js";
import { Heatmap, Legend } from "../draw.js";
import { HeadButton, useEffects } from "../heads.js";
import { Caption, Choice, Numbers, SaveButtons, View as Frame, Waiting, labelsOf } from "../parts.js";
import { selection } from "../side.js";
import { open } from "../spine.js";
import { useWidth } from "../size.js";

/** The tokens of queries and of keys. */
export function sidesOf(header, kind) {
  const queries = kind === "encoder" ? header.source : header.target;
  return [queries, kind === "decoder" ? queries : header.source];
}

export function View() {
  const { frame, error, stale } = useFrame("trace", state.text.value.trim() ? textOf() : null);
  const { kind, layer, head } = place.value;
  useEffect(() => {
    selection.value = { step: "weights" };
  }, []);
  const kinds = kindsOf(model.value.config);
  const tools = html`${kinds.length > 1 && html`<${Choice} label=${t("attention.kind")} value=${kind} options=${kinds.map((each) => [each, t(`kind.${each}`)])}
    onChange=${(each) => go({ kind: each, layer: null, head: null })} />`}<${SaveButtons} />`;
  if (!state.text.value.trim()) return html`<${Frame} title=${t("view.attention")}><p class="problem" role="alert">${t("error.empty")}</p></${Frame}>`;
  if (!frame) return html`<${Frame} title=${t("view.attention")}><${Waiting} error=${error} /></${Frame}>`;
  const title = head !== null ? t("place.head", { kind: t(`kind.${kind}`), layer: /** @type {number} */ (layer) + 1, head: head + 1 }) : layer !== null ? t("attention.layer", { kind: t(`kind.${kind}`), layer: layer + 1 }) : t("attention.title", { kind: t(`kind.${kind}`) });
  return html`<${Frame} title=${title} lead=${t(`attention.${kind}`)} tools=${tools}>
    <div class=${stale ? "content stale" : "content"}>
    ${head === null ? html`<${Overview} frame=${frame} kind=${kind} layer=${layer} />` : html`<${OneHead} header=${frame.header} kind=${kind} layer=${layer} head=${head} />`}
    </div></${Frame}>`;
}

function Overview({ frame, kind, layer }) {
  const { data, shape } = frame.tensors[kind];
  const [layers, heads, rows, columns] = shape;
  const shown = layer === null ? Array.from({ length: layers }, (_, i) => i) : [layer];
  const size = rows * columns;
  const parts = useMemo(() => shown.map((l) => Array.from({ length: heads }, (_, h) => {
    const start = (l * heads + h) * size;
    return data.subarray(start, start + size);
  })), [data, layer]);
  const [queries, keys] = sidesOf(frame.header, kind);
  const effects = useEffects(textOf(), kind, layers, layer);
  const block = Math.ceil(Math.max(queries.ids.length, keys.ids.length) / 96);
  const move = (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -heads, ArrowDown: heads }[/** @type {"ArrowUp"} */ (event.key)];
    if (!step) return;
    const all = [.../** @type {HTMLElement} */ (event.currentTarget).querySelectorAll("button")];
    const next = all[all.indexOf(/** @type {any} */ (document.activeElement)) + step];
    if (next) {
      event.preventDefault();
      next.focus();
    }
  };
  return html`<div class=${layer === null ? "overview" : "overview one"} role="group" aria-label=${t("attention.overview")} onKeyDown=${move}>
    ${shown.map((l, i) => html`<div class="overview-row" key=${l}><button type="button" class="row-name" onClick=${() => open(kind, layer === null ? l : null, null)}>${t("part.layer", { layer: l + 1 })}</button>
      <div class="thumbnails" style=${{ "--heads": heads }}>${parts[i].map((each, h) => html`<${HeadButton} key=${h} data=${each} rows=${rows} columns=${columns} causal=${kind === "decoder" && rows === columns}
        layer=${l} head=${h} effects=${effects} onOpen=${() => open(kind, l, h)} />`)}</div></div>`)}
    </div>
    <p class="scale"><${Legend} masked=${kind === "decoder" ? t("legend.masked") : ""} /> <span class="note">${t("attention.scale")}${block > 1 ? " " + t("attention.block", { size: block }) : ""} ${t("effect.below")}</span></p>
    <${Sharpest} frame=${frame} kind=${kind} />
    ${layer !== null && html`<p><button type="button" class="small" onClick=${() => go({ view: "switches" })}>${t("attention.switch")}</button></p>`}`;
}

/** A computed caption: which heads look back one token, at the first token, or at many. */
function Sharpest({ frame, kind }) {
  const { data, shape: [layers, heads] } = frame.tensors[`${kind}_patterns`];
  const rows = sidesOf(frame.header, kind)[0].ids.length;
  const found = Array.from({ length: layers * heads }, (_, i) => ({ layer: Math.floor(i / heads), head: i % heads, previous: data[3 * i], first: data[3 * i + 1], peak: data[3 * i + 2] }));
  const best = (name, sign = 1) => found.reduce((a, b) => (sign * b[name] > sign * a[name] ? b : a));
  const line = (key, each, value) => html`<li>${t(key, { layer: each.layer + 1, head: each.head + 1, share: percent(value, 0) })} <button type="button" class="link" onClick=${() => open(kind, each.layer, each.head)}>${t("open")}</button></li>`;
  return html`<ul class="caption facts-list">
    ${kind !== "cross" && rows > 1 && html`${line("attention.previous", best("previous"), best("previous").previous)}`}
    ${line("attention.first", best("first"), best("first").first)}${line("attention.sharp", best("peak"), best("peak").peak)}${line("attention.broad", best("peak", -1), best("peak", -1).peak)}</ul>`;
}

function OneHead({ header, kind, layer, head }) {
  const { frame, error, stale } = useFrame("head", { ...textOf(), kind, layer, head });
  const [hover, setHover] = useState(/** @type {[number | null, number | null] | null} */ (null));
  const [ref, width] = useWidth();
  const [queries, keys] = sidesOf(header, kind);
  const rowLabels = useMemo(() => labelsOf(queries), [queries]), columnLabels = useMemo(() => labelsOf(keys), [keys]);
  const heads = model.value.config.heads, layers = depth(model.value.config, kind);
  useEffect(() => {
    selection.value = { step: "weights", terms: { output: columnLabels } };
  }, [columnLabels]);
  useEffect(() => { // the neighbors, so that walking from head to head does not wait
    for (const next of [head - 1, head + 1]) if (next >= 0 && next < heads) post("head", { ...textOf(), kind, layer, head: next }).catch(() => null);
  }, [kind, layer, head]);
  const row = hover?.[0] ?? state.row.value, column = hover?.[1] ?? state.column.value;
  const step = (by) => {
    const next = layer * heads + head + by;
    if (next >= 0 && next < heads * layers) go({ layer: Math.floor(next / heads), head: next % heads });
  };
  const walk = html`<div class="walk"><button type="button" class="small" onClick=${() => step(-1)} aria-label=${t("attention.back")}>←</button>
    <button type="button" class="small" onClick=${() => step(1)} aria-label=${t("attention.forward")}>→</button>
    <button type="button" class="small" onClick=${() => go({ view: "steps" })}>${t("attention.steps")}</button></div>`;
  if (!frame) return html`<div ref=${ref}>${walk}<${Waiting} error=${error} /></div>`;
  const { data, shape } = frame.tensors.weights, mask = frame.tensors.mask.data;
  const [rows, columns] = shape;
  if (rows !== queries.ids.length || columns !== keys.ids.length) return html`<div ref=${ref}>${walk}<${Waiting} error=${null} /></div>`;
  const effect = frame.header.effect;
  const r = Math.min(row ?? rows - 1, rows - 1);
  const best = Array.from({ length: columns }, (_, c) => [c, data[r * columns + c]]).filter(([c]) => mask[r * columns + c]).sort((a, b) => b[1] - a[1]);
  const pick = (a, b) => go({ row: a, column: b });
  return html`<div ref=${ref}>${walk}<div class=${stale ? "head-view stale" : "head-view"}>
    <${Heatmap} name="head" data=${data} rows=${rows} columns=${columns} mask=${mask} rowLabels=${rowLabels} columnLabels=${columnLabels}
      width=${Math.min(width, 620)} height=${620} selected=${state.row.value === null ? null : [Math.min(state.row.value, rows - 1), Math.min(state.column.value ?? 0, columns - 1)]} onSelect=${pick}
      onHover=${(a, b) => setHover(a === null && b === null ? null : [a, b])} label=${t("attention.matrix", { rows, columns })} />
    <div class="head-facts">
      <div class="effect" data-divergence=${effect.divergence}><h3>${t("effect.title")}</h3>
        <dl><dt>${t("effect.divergence")}</dt><dd>${number(effect.divergence, 4)} <small>nat</small></dd>
        ${effect.loss !== null && html`<dt>${t("effect.loss")}</dt><dd>${number(frame.header.loss, 3)} → ${number(effect.loss, 3)}</dd>`}
        <dt>${t("effect.changed")}</dt><dd>${percent(effect.changed, 0)}</dd></dl>
        <p class="note">${t(effect.divergence < 0.01 ? "effect.small" : effect.divergence < 0.1 ? "effect.middle" : "effect.large")}</p></div>
      <div class="readout" aria-live="polite"><h3>${t("attention.row", { token: visible(queries.pieces[r]), position: r + 1 })}</h3>
        <ol class="best">${best.slice(0, 6).map(([c, w]) => html`<li><span class="piece">${columnLabels[c]}</span><span class="meter"><span style=${{ width: `${w * 100}%` }}></span></span><span class="num">${number(w)}</span></li>`)}</ol>
        ${column !== null && column < columns && html`<p class="cell" data-cell=${`${r},${column}`}>${rowLabels[r]} → ${columnLabels[column]}: ${mask[r * columns + column] ? html`<strong class="num">${number(data[r * columns + column], 4)}</strong>` : t("masked")}</p>`}</div>
    </div></div>
    <p class="scale"><${Legend} masked=${t("legend.masked")} /> <span class="note">${t("attention.scale")}</span></p>
    <${Numbers} title=${t("attention.table", { token: visible(queries.pieces[r]), position: r + 1 })} head=${[t("key"), t("weight")]}
      rows=${Array.from({ length: columns }, (_, c) => [`${c + 1} ${columnLabels[c]}`, mask[r * columns + c] ? number(data[r * columns + c], 4) : t("masked")])} />
    <${Caption}>${t("attention.caption", { token: visible(queries.pieces[r]), key: columnLabels[best[0]?.[0] ?? 0], share: percent(best[0]?.[1] ?? 0, 0) })}</${Caption}></div>`;
}
