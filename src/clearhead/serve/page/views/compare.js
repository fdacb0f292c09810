// @ts-check
// Compare: the same text in two models (or two checkpoints), head by head, with the difference of their weights.
import { html, useEffect, useMemo } from "../html.js";
import { state, textOf, model, models, place, go, kindsOf } from "../state.js";
import { useFrame } from "../api.js";
import { t, number, percent, count, visible } from "../i18n.js";
import { Heatmap, Legend, extent } from "../draw.js";
import { HeadButton, useEffects } from "../heads.js";
import { Caption, Choice, Numbers, SaveButtons, View as Frame, Waiting, labelsOf } from "../parts.js";
import { selection } from "../side.js";
import { useWidth } from "../size.js";
import { sidesOf } from "./attention.js";

/** Models that can be compared: of the same family; those of one run are its checkpoints. */
function others() {
  return models.value.filter((each) => each.family === model.value.family);
}

export function View() {
  const own = model.value, list = others(), second = list.find((each) => each.name === state.other.value) ?? list.find((each) => each.name !== own.name) ?? own;
  const { kind, layer, head } = place.value;
  useEffect(() => {
    selection.value = { step: "distance", cell: null, more: html`<h3>${t("compare.side")}</h3><p class="note">${t("compare.side.note")}</p>` };
    return () => { selection.value = null; };
  }, [state.language.value]);
  const empty = !state.text.value.trim();
  const body = (each) => ({ ...textOf(), model: each.name });
  const first = useFrame("trace", empty ? null : body(own));
  // The second model reads the same target as the first, so that positions mean the same.
  const target = first.frame?.header.target?.texts?.[0];
  const same = first.frame && own.family === "encoder-decoder" ? { ...body(second), target, appended: [] } : body(second);
  const other = useFrame("trace", empty || !first.frame ? null : same);
  const kinds = kindsOf(own.config);
  const tools = html`${kinds.length > 1 && html`<${Choice} label=${t("attention.kind")} value=${kind} options=${kinds.map((each) => [each, t(`kind.${each}`)])} onChange=${(each) => go({ kind: each, layer: null, head: null })} />`}<${SaveButtons} />`;
  if (empty) return html`<${Frame} title=${t("view.compare")}><p class="problem" role="alert">${t("error.empty")}</p></${Frame}>`;
  if (!first.frame) return html`<${Frame} title=${t("view.compare")}><${Waiting} error=${first.error} /></${Frame}>`;
  return html`<${Frame} title=${t("view.compare")} lead=${t("compare.lead")} tools=${tools}>
    <${Chooser} list=${list} second=${second} />
    ${list.length < 2 && html`<p class="problem" role="status">${t("compare.one")}</p>`}
    ${!other.frame ? html`<${Waiting} error=${other.error} />` : html`<${Both} a=${first.frame} b=${other.frame} names=${[own.name, second.name]} kind=${kind} layer=${layer} head=${head} bodies=${[body(own), same]} />`}</${Frame}>`;
}

/** The second model; several checkpoints of a run are a slider. */
function Chooser({ list, second }) {
  const steps = list.filter((each) => /step-\d+$/.test(each.name)).sort((a, b) => +a.name.match(/(\d+)$/)[1] - +b.name.match(/(\d+)$/)[1]);
  const at = steps.indexOf(second);
  return html`<div class="compare-with"><label class="pick"><span>${t("compare.with")}</span><select value=${second.name} onChange=${(e) => (state.other.value = e.target.value)}>
      ${list.map((each) => html`<option value=${each.name}>${each.name}</option>`)}</select></label>
    ${steps.length > 1 && html`<label class="slider"><span>${t("compare.checkpoint")}</span><input type="range" min="0" max=${steps.length - 1} step="1" value=${Math.max(at, 0)} onInput=${(e) => (state.other.value = steps[+e.target.value].name)} /><output>${at < 0 ? "–" : count(+steps[at].name.match(/(\d+)$/)[1])}</output></label>`}</div>`;
}

function Both({ a, b, names, kind, layer, head, bodies }) {
  const frames = [a, b];
  const layers = frames.map((each) => each.tensors[kind]?.shape[0] ?? 0);
  const loss = frames.map((each) => each.header.loss);
  const sameTokens = JSON.stringify(a.header.target?.ids ?? a.header.source.ids) === JSON.stringify(b.header.target?.ids ?? b.header.source.ids) && JSON.stringify(a.header.source?.ids) === JSON.stringify(b.header.source?.ids);
  return html`${loss.some((each) => each !== null) && html`<dl class="facts-row compare-loss">${names.map((name, i) => html`<div><dt>${t("compare.loss", { model: name })}</dt><dd>${number(loss[i])}</dd></div>`)}</dl>`}
    <${Samples} names=${names} bodies=${bodies} />
    ${!sameTokens && html`<p class="note">${t("compare.tokens")}</p>`}
    ${head !== null && layer !== null && layer < Math.min(...layers) ? html`<${Heads} names=${names} kind=${kind} layer=${layer} head=${head} bodies=${bodies} frames=${frames} sameTokens=${sameTokens} />`
      : html`<${Rows} frames=${frames} names=${names} kind=${kind} layers=${layers} sameTokens=${sameTokens} bodies=${bodies} />`}`;
}

/** What each model writes: its translation, continuation, or the words it fills in. */
function Samples({ names, bodies }) {
  const encoder = model.value.family === "encoder";
  const found = bodies.map((body) => useFrame(encoder ? "understand" : "switch", body));
  const words = (header) => encoder
    ? header.predictions.slice(0, 8).map((each) => `${visible(each.texts[0])} ${percent(each.probs[0], 0)}`).join(" · ") : header.written;
  if (found.some((each) => each.error || (each.frame && !words(each.frame.header)))) return null;
  return html`<div class="beside samples">${names.map((name, i) => html`<div class=${found[i].stale ? "stale" : ""}><h3>${t(encoder ? "compare.predicts" : "compare.writes", { model: name })}</h3>
    <p class="text-out">${found[i].frame && words(found[i].frame.header)}</p></div>`)}</div>`;
}

/** All heads of both models, a layer on each row. */
function Rows({ frames, names, kind, layers, sameTokens, bodies }) {
  const effects = bodies.map((each, i) => useEffects(each, kind, layers[i]));
  const distances = useMemo(() => {
    if (!sameTokens || frames[0].tensors[kind].shape.join() !== frames[1].tensors[kind].shape.join()) return [];
    const [l, h, r, c] = frames[0].tensors[kind].shape, result = [];
    if (r !== sidesOf(frames[0].header, kind)[0].ids.length) return []; // blocks of a long text are maxima, not weights
    for (let i = 0; i < l * h; i++) {
      let sum = 0;
      for (let k = i * r * c; k < (i + 1) * r * c; k++) sum += Math.abs(frames[0].tensors[kind].data[k] - frames[1].tensors[kind].data[k]);
      result.push({ layer: Math.floor(i / h), head: i % h, distance: sum / 255 / r / 2 });
    }
    return result.sort((x, y) => y.distance - x.distance);
  }, [frames[0], frames[1], kind]);
  return html`${Array.from({ length: Math.max(...layers) }, (_, l) => html`<div class="compare-row"><button type="button" class="row-name" onClick=${() => go({ kind, layer: l, head: 0 })}>${t("part.layer", { layer: l + 1 })}</button>
    ${frames.map((frame, i) => html`<div><span class="note">${names[i]}</span><div class="thumbnails small-thumbs" style=${{ "--heads": frame.tensors[kind].shape[1] }}>${l < layers[i] && Array.from({ length: frame.tensors[kind].shape[1] }, (_, h) => {
      const [, heads, rows, columns] = frame.tensors[kind].shape, start = (l * heads + h) * rows * columns;
      return html`<${HeadButton} name=${names[i]} data=${frame.tensors[kind].data.subarray(start, start + rows * columns)} rows=${rows} columns=${columns} causal=${kind === "decoder" && rows === columns}
        layer=${l} head=${h} effects=${effects[i]} onOpen=${() => go({ kind, layer: l, head: h })} />`;
    })}</div></div>`)}</div>`)}
    <p class="scale"><${Legend} masked=${kind === "decoder" ? t("legend.masked") : ""} /> <span class="note">${t("effect.below")}</span></p>
    ${distances.length > 0 && html`<${Caption}>${t("compare.caption", { layer: distances[0].layer + 1, head: distances[0].head + 1, share: percent(distances[0].distance, 0) })}</${Caption}>
    <${Numbers} title=${t("compare.table")} head=${[t("switches.part"), t("compare.distance")]} rows=${distances.map((d) => [t("place.head", { kind: t(`kind.${kind}`), layer: d.layer + 1, head: d.head + 1 }), d.distance])} />`}`;
}

function Heads({ names, kind, layer, head, bodies, frames, sameTokens }) {
  const found = bodies.map((body) => useFrame("head", { ...body, kind, layer, head }));
  const [ref, width] = useWidth();
  if (!found[0].frame || !found[1].frame) return html`<div ref=${ref}><${Waiting} error=${found[0].error ?? found[1].error} /></div>`;
  const each = Math.min(400, width > 640 ? (width - 24) / 2 : width);
  const tensors = found.map((f) => f.frame.tensors);
  const alike = sameTokens && tensors[0].weights.shape.join() === tensors[1].weights.shape.join();
  const sides = frames.map((f) => sidesOf(f.header, kind).map(labelsOf));
  const map = (data, shape, mask, side, name, scale = "weight") => html`<${Heatmap} name=${name} data=${data} rows=${shape[0]} columns=${shape[1]} mask=${mask} scale=${scale}
    rowLabels=${side[0]} columnLabels=${side[1]} width=${each} height=${420} label=${t("attention.matrix", { rows: shape[0], columns: shape[1] })} selected=${state.row.value === null ? null : [Math.min(state.row.value, shape[0] - 1), Math.min(state.column.value ?? 0, shape[1] - 1)]} onSelect=${(r, c) => go({ row: r, column: c })} />`;
  const difference = alike ? Float32Array.from(tensors[0].weights.data, (x, i) => tensors[1].weights.data[i] - x) : null;
  const [low, high] = difference ? extent(difference) : [0, 0], most = Math.max(-low, high);
  return html`<div ref=${ref}><p><button type="button" class="small" onClick=${() => go({ layer: null, head: null })}>${t("compare.all")}</button></p>
    <div class="compare-heads">${names.map((name, i) => html`<div><h3>${name}</h3>${map(tensors[i].weights.data, tensors[i].weights.shape, tensors[i].mask.data, sides[i], `compare-${i}`)}
      <p class="note">${t("effect.divergence")}: ${number(found[i].frame.header.effect.divergence, 4)} nat</p></div>`)}
    ${difference && html`<div><h3>${t("compare.difference")}</h3>${map(difference, tensors[0].weights.shape, tensors[0].mask.data, sides[0], "compare-difference", "difference")}<p class="scale"><${Legend} scale="difference" low=${-most} high=${most} /></p></div>`}</div>
    ${state.row.value !== null && alike && html`<p class="cell">${sides[0][0][Math.min(state.row.value, sides[0][0].length - 1)]} → ${sides[0][1][Math.min(state.column.value ?? 0, sides[0][1].length - 1)]}: ${tensors.map((x) => number(x.weights.data[Math.min(state.row.value ?? 0, x.weights.shape[0] - 1) * x.weights.shape[1] + Math.min(state.column.value ?? 0, x.weights.shape[1] - 1)], 4)).join(" / ")}</p>`}</div>`;
}
