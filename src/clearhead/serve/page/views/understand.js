// @ts-check
// Understand: what an encoder predicts (masks, classes, tags, spans), what each token contributes, and the attention of [CLS].
import { html, useEffect, useState } from "../html.js";
import { state, textOf, go } from "../state.js";
import { useFrame } from "../api.js";
import { t, number, percent, visible } from "../i18n.js";
import { Heatmap, Legend, extent } from "../draw.js";
import { Caption, Facts, Numbers, SaveButtons, View as Frame, Waiting, labelsOf } from "../parts.js";
import { selection } from "../side.js";
import { useWidth } from "../size.js";

export function View() {
  const empty = !state.text.value.trim();
  const trace = useFrame("trace", empty ? null : textOf());
  const { frame, error, stale } = useFrame("understand", empty ? null : textOf());
  useEffect(() => {
    selection.value ??= { step: "drops", cell: null };
    return () => { selection.value = null; };
  }, []);
  if (empty) return html`<${Frame} title=${t("view.understand")}><p class="problem" role="alert">${t("error.empty")}</p></${Frame}>`;
  if (!frame || !trace.frame) return html`<${Frame} title=${t("view.understand")}><${Waiting} error=${error ?? trace.error} /></${Frame}>`;
  const side = trace.frame.header.source, task = frame.header.task;
  if (frame.tensors.cls.shape[2] !== side.ids.length) return html`<${Frame} title=${t("view.understand")}><${Waiting} error=${null} /></${Frame}>`;
  return html`<${Frame} title=${t("view.understand")} lead=${t(`understand.${task}`)} tools=${html`<${SaveButtons} />`}>
    <div class=${stale ? "stale" : ""}><${Predictions} frame=${frame} side=${side} /><${Cls} tensor=${frame.tensors.cls} side=${side} /></div></${Frame}>`;
}

function Predictions({ frame, side }) {
  const { predictions, task, hidden_token } = frame.header, labels = labelsOf(side);
  const [at, setAt] = useState(0);
  const [ref, width] = useWidth();
  if (!predictions.length) return html`<div ref=${ref}><p class="note">${t(task === "fill" ? "understand.no_mask" : "understand.nothing")}</p></div>`;
  const chosen = Math.min(at, predictions.length - 1), drops = frame.tensors.drops, each = predictions[chosen];
  const name = (p) => (task === "answer" ? t(p.row === 0 ? "understand.start" : "understand.end") : task === "classify" ? t("understand.class") : `${labels[p.row]} (${p.row + 1})`);
  const text = (label) => (task === "answer" ? labels[+label] ?? label : visible(label));
  return html`<div ref=${ref}>${predictions.length > 1 && html`<div class="strip" role="group" aria-label=${t("understand.predictions")}>${predictions.map((p, i) => html`<button type="button" class="token" aria-pressed=${i === chosen} onClick=${() => setAt(i)}><span class="piece">${name(p)}</span><span class="id">${text(p.texts[0])}</span></button>`)}</div>`}
    <h3>${name(each)}</h3><ol class="best neighbors">${each.texts.map((label, i) => html`<li><span class="piece">${text(label)}</span><span class="meter"><span style=${{ width: `${each.probs[i] * 100}%` }}></span></span><span class="num">${percent(each.probs[i])}</span></li>`)}</ol>
    ${drops && html`<${Drops} drops=${drops} row=${chosen} labels=${labels} best=${text(each.texts[0])} prob=${each.probs[0]} token=${hidden_token} width=${width} />`}</div>`;
}

/** What hiding each token costs the prediction. */
function Drops({ drops, row, labels, best, prob, token, width }) {
  const columns = drops.shape[1], values = drops.data.subarray(row * columns, (row + 1) * columns), [low, high] = extent(values), most = Math.max(-low, high);
  const order = labels.map((label, i) => [label, values[i]]).sort((a, b) => Math.abs(b[1]) - Math.abs(a[1]));
  const strongest = Array.from(values.keys()).sort((a, b) => Math.abs(values[b]) - Math.abs(values[a]))[0], at = Math.min(state.column.value ?? strongest, columns - 1);
  useEffect(() => {
    selection.value = { step: "drops", cell: html`<${Facts} title=${t("drops.hidden", { token: labels[at] })} rows=${[[t("drops.before"), number(Math.log(prob), 4)], [t("drops.after"), number(Math.log(prob) - values[at], 4)], ["Δ", number(values[at], 4)]]} />`,
      more: html`<h3>${t("understand.cls")}</h3><p class="note">${t("understand.cls.note")}</p>` };
  }, [drops, row, at, prob, state.language.value]);
  return html`<h3>${t("drops.title", { label: best })}</h3><p class="note">${t("drops.note", { token: t(`role.${token}`) })}</p>
    <${Heatmap} name="drops" data=${values} rows=${1} columns=${columns} scale="difference" columnLabels=${labels} width=${Math.min(width, 34 * columns + 4)} height=${130} label=${t("drops.matrix", { columns })}
      selected=${[0, at]} onSelect=${(_, c) => go({ row: 0, column: c })} />
    <p class="scale"><${Legend} scale="difference" low=${-most} high=${most} /></p>
    <${Caption}>${most < 1e-6 ? t("drops.nothing") : t(order[0][1] < 0 ? "drops.caption.gain" : "drops.caption", { token: order[0][0], change: number(Math.abs(order[0][1]), 2), label: best })}</${Caption}>
    <${Numbers} title=${t("drops.table")} head=${[t("token"), t("drops.change")]} rows=${order} />`;
}

function Cls({ tensor, side }) {
  const [layers, heads, tokens] = tensor.shape, labels = labelsOf(side), [ref, width] = useWidth(), effects = useFrame("effects", { ...textOf(), group: "heads" });
  const rows = Array.from({ length: layers * heads }, (_, i) => `${Math.floor(i / heads) + 1}.${(i % heads) + 1}`);
  const mean = labels.map((label, i) => [label, rows.reduce((sum, _, r) => sum + tensor.data[r * tokens + i], 0) / rows.length]).sort((a, b) => Number(b[1]) - Number(a[1]));
  return html`<div ref=${ref}><h3>${t("understand.cls.title", { token: labels[0] })}</h3>
    <div class="head-view"><${Heatmap} name="cls" data=${tensor.data} rows=${rows.length} columns=${tokens} rowLabels=${rows} columnLabels=${labels} width=${Math.min(width, 620)} height=${520} maxCell=${26} label=${t("understand.cls.matrix", { rows: rows.length, columns: tokens })} />
    ${effects.frame && html`<div class="head-facts"><div class="effect"><h3>${t("understand.effects")}</h3><ol class="best">${effects.frame.header.effects.slice(0, 8).map((e) => html`<li><span>${e.layer + 1}.${e.head + 1}</span><span class="meter"><span style=${{ width: `${(100 * e.divergence) / Math.max(effects.frame.header.effects[0].divergence, 1e-9)}%` }}></span></span><span class="num">${number(e.divergence, 4)}</span></li>`)}</ol>
      <p class="note">${t("understand.effects.note", { idle: effects.frame.header.effects.filter((e) => e.divergence < 0.01).length, of: effects.frame.header.of })}</p></div></div>`}</div>
    <p class="scale"><${Legend} /> <span class="note">${t("understand.cls.rows")}</span></p>
    <${Caption}>${t("understand.cls.caption", { token: labels[0], key: mean[0][0], share: percent(/** @type {number} */ (mean[0][1]), 0) })}</${Caption}>
    <${Numbers} title=${t("understand.cls.table")} head=${[t("token"), t("weight")]} rows=${mean} /></div>`;
}
