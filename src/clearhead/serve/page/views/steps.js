// @ts-check
// One head, step by step: each matrix from the input to the residual stream; a cell opens its dot product at the right.
import { html, useEffect, useMemo } from "../html.js";
import { state, place, go, textOf, model, depth, kindsOf } from "../state.js";
import { useFrame } from "../api.js";
import { t, number, percent, visible } from "../i18n.js";
import { Heatmap, Legend, extent } from "../draw.js";
import { Caption, Choice, Numbers, SaveButtons, View as Frame, Waiting, labelsOf } from "../parts.js";
import { selection } from "../side.js";
import { useWidth } from "../size.js";
import { sidesOf } from "./attention.js";

/** @typedef {{step: string, name: string, rows: "q" | "k", columns: "q" | "k" | "e" | "d", scale?: string, masked?: boolean, operator?: string}} Step */
/** The steps of a head in order. @returns {Step[]} */
function stepsOf(header, tensors) {
  /** @type {Step[]} */
  const steps = [{ step: "x", name: "x", rows: "q", columns: "d" }];
  const qk = header.rotary
    ? [["q", "q_unrotated"], ["k", "k_unrotated"], ["rope_q", "q"], ["rope_k", "k"]] : [["q", "q"], ["k", "k"]];
  for (const [step, name] of qk) steps.push({ step, name, rows: name.startsWith("q") ? "q" : "k", columns: "e" });
  steps.push({ step: "v", name: "v", rows: "k", columns: "e" });
  for (const step of ["scores", "scaled"]) steps.push({ step, name: step, rows: "q", columns: "k" });
  steps.push({ step: "mask", name: "scaled", rows: "q", columns: "k", masked: true });
  steps.push({ step: "weights", name: "weights", rows: "q", columns: "k", scale: "weight", masked: true });
  steps.push({ step: "output", name: "output", rows: "q", columns: "e" }, { step: "update", name: "update", rows: "q", columns: "d" }, { step: "sum", name: "sublayer", rows: "q", columns: "d" });
  return steps.filter((each) => tensors[each.name]);
}

/** Which steps have numbers that can be opened. */
const CELLS = ["q", "k", "v", "rope_q", "rope_k", "scores", "scaled", "weights", "output", "update", "sum"];

export function View() {
  const { kind, layer: givenLayer, head: givenHead } = place.value;
  const layer = givenLayer ?? 0, head = givenHead ?? 0;
  useEffect(() => { if (givenLayer === null || givenHead === null) go({ kind, layer, head, row: state.row.value, column: state.column.value }); }, [kind, givenLayer, givenHead]);
  const empty = !state.text.value.trim();
  const trace = useFrame("trace", empty ? null : textOf());
  const { frame, error, stale } = useFrame("steps", empty ? null : { ...textOf(), kind, layer, head });
  const [ref, width] = useWidth(720);
  const title = t("place.head", { kind: t(`kind.${kind}`), layer: layer + 1, head: head + 1 });
  if (empty) return html`<${Frame} title=${title}><p class="problem" role="alert">${t("error.empty")}</p></${Frame}>`;
  if (!frame || !trace.frame) return html`<${Frame} title=${title}><div ref=${ref}><${Waiting} error=${error ?? trace.error} /></div></${Frame}>`;
  const [queries, keys] = sidesOf(trace.frame.header, kind);
  if (frame.tensors.q.shape[0] !== queries.ids.length || frame.tensors.k.shape[0] !== keys.ids.length)
    return html`<${Frame} title=${title}><div ref=${ref}><${Waiting} error=${null} /></div></${Frame}>`;
  const kinds = kindsOf(model.value.config), config = model.value.config;
  const tools = html`${kinds.length > 1 && html`<${Choice} label=${t("attention.kind")} value=${kind} options=${kinds.map((each) => [each, t(`kind.${each}`)])} onChange=${(each) => go({ kind: each, layer: 0, head: 0 })} />`}
    <${Pick} label=${t("steps.layer")} count=${depth(config, kind)} value=${layer} onChange=${(l) => go({ layer: l })} />
    <${Pick} label=${t("steps.head")} count=${config.heads} value=${head} onChange=${(h) => go({ head: h })} /><${SaveButtons} />`;
  return html`<${Frame} title=${title} lead=${t(`steps.lead.${frame.header.norm_position}`)} tools=${tools}>
    <div ref=${ref} class=${stale ? "steps stale" : "steps"}><${Steps} frame=${frame} queries=${queries} keys=${keys} width=${width} /></div>
    <${Around} kind=${kind} layer=${layer} queries=${queries} width=${width} />
  </${Frame}>`;
}

function Pick({ label, count, value, onChange }) {
  return html`<label class="pick"><span>${label}</span><select value=${value} onChange=${(e) => onChange(+e.target.value)}>
    ${Array.from({ length: count }, (_, i) => html`<option value=${i}>${i + 1}</option>`)}</select></label>`;
}

function Steps({ frame, queries, keys, width }) {
  const { header, tensors } = frame;
  const labels = useMemo(() => ({ q: labelsOf(queries), k: labelsOf(keys) }), [queries, keys]);
  const steps = useMemo(() => stepsOf(header, tensors), [frame]);
  const chosen = state.step.value || "scores";
  const dims = Array.from({ length: header.head_dim }, (_, i) => `${i + 1}`);
  useEffect(() => {
    selection.value = { step: chosen, terms: { scores: dims, output: labels.k, update: labels.k, sum: Array.from({ length: header.heads }, (_, i) => t("part.head", { head: i + 1 })) } };
  }, [chosen, labels, header.heads, state.language.value]);
  const group = header.heads / header.kv_heads;
  return html`<ol class="chain">${steps.map((each, i) => {
    const { data, shape: [rows, columns] } = tensors[each.name];
    const [low, high] = extent(data, each.masked ? tensors.mask.data : null);
    const square = each.columns === "k";
    const inner = (width >= 660 ? Math.floor((width - 10) / 2) : width - 10) - 32;
    const cells = CELLS.includes(each.step);
    const here = chosen === each.step && state.row.value !== null && cells;
    const selected = here ? [Math.min(state.row.value, rows - 1), Math.min(state.column.value ?? 0, columns - 1)] : null;
    return html`<li key=${each.step + each.name} class=${chosen === each.step ? "on" : ""}><div class="step-head"><button type="button" onClick=${() => go({ step: each.step })} aria-pressed=${chosen === each.step}><span class="step-number">${i + 1}</span>${t(`step.${each.step}`)}</button>
        <span class="shape">${rows} × ${columns}</span></div>
      ${each.step === "k" && group > 1 && html`<p class="note">${t("steps.grouped", { group, kv: header.kv_heads })}</p>`}
      <${Heatmap} name=${each.step} data=${data} rows=${rows} columns=${columns} scale=${each.scale ?? "magnitude"} mask=${each.masked ? tensors.mask.data : null}
        rowLabels=${labels[each.rows]} columnLabels=${square ? labels.k : undefined} width=${inner} height=${square ? 460 : Math.max(60, Math.min(20 * rows, 340))} maxCell=${square ? 30 : 20}
        selected=${selected} onSelect=${(r, c) => go({ step: each.step, row: r, column: c })}
        label=${t("steps.matrix", { step: t(`step.${each.step}`), rows, columns })} />
      <p class="scale"><${Legend} scale=${each.scale ?? "magnitude"} low=${each.scale ? 0 : low} high=${each.scale ? 1 : high} masked=${each.masked ? t("legend.masked") : ""} />
        ${selected && html`<span class="cell" data-cell=${`${each.step},${selected.join(",")}`}>${labels[each.rows][selected[0]]}${square ? ` → ${labels.k[selected[1]]}` : ` [${selected[1] + 1}]`} = <strong class="num">${number(data[selected[0] * columns + selected[1]], 4)}</strong></span>`}</p>
      <${Numbers} title=${t("steps.table", { step: t(`step.${each.step}`) })} head=${["", ...Array.from({ length: Math.min(columns, 12) }, (_, c) => (square ? labels.k[c] : `${c + 1}`))]}
        rows=${Array.from({ length: Math.min(rows, 64) }, (_, r) => [labels[each.rows][r], ...Array.from({ length: Math.min(columns, 12) }, (_, c) => data[r * columns + c])])} /></li>`;
  })}</ol>
  <${ValueUp} frame=${frame} queries=${queries} labels=${labels} />`;
}

/** Value down, value up: what each key would add to the stream, and how much of it the weights let through. */
function ValueUp({ frame, queries, labels }) {
  const { weights, value_up, update } = frame.tensors;
  const [keys, dim] = value_up.shape, [rows] = weights.shape;
  const row = Math.min(state.row.value ?? rows - 1, rows - 1);
  const length = (data, r) => Math.hypot(...data.subarray(r * dim, (r + 1) * dim));
  const whole = length(update.data, row);
  const parts = Array.from({ length: keys }, (_, k) => [k, weights.data[row * keys + k], length(value_up.data, k)]).sort((a, b) => b[1] * b[2] - a[1] * a[2]);
  return html`<h3>${t("steps.value_up")}</h3><p class="note">${t("steps.value_up.note", { head_dim: frame.header.head_dim, dim })}</p>
    <${Numbers} open=${true} title=${t("steps.value_up.table", { token: visible(queries.pieces[row]), length: number(whole) })} head=${[t("key"), t("weight"), t("steps.length"), t("steps.passes")]}
      rows=${parts.slice(0, 8).map(([k, w, l]) => [labels.k[k], w, l, w * l])} />`;
}

/** The norm and the feed-forward around the head: lengths of the stream and of what each sublayer adds. */
function Around({ kind, layer, queries, width }) {
  const { frame, error } = useFrame("layer", { ...textOf(), kind, layer });
  if (!frame) return html`<${Waiting} error=${error} />`;
  const { tensors } = frame, tokens = queries.ids.length, names = ["x", "attention", "cross", "feed_forward", "output"].filter((name) => tensors[name]);
  const hidden = tensors.hidden, [rows, columns] = hidden.shape;
  if (tensors.x.shape[1] !== tokens && kind !== "cross") return null;
  const labels = labelsOf(queries).slice(0, rows);
  const relu = model.value.config.activation === "relu", squares = Float64Array.from(hidden.data, (x) => x * x).sort().reverse();
  const active = squares.reduce((sum, x) => sum + +(x > 0), 0) / squares.length, all = squares.reduce((a, b) => a + b, 0) || 1;
  const strongest = squares.subarray(0, Math.ceil(squares.length / 10)).reduce((a, b) => a + b, 0) / all;
  return html`<h3>${t("steps.around")}</h3><p class="note">${t("steps.around.note")}</p>
    <${Numbers} open=${true} title=${t("steps.around.table", { layer: layer + 1 })} head=${[t("token"), ...names.map((name) => t(`stream.${name}`))]}
      rows=${labels.map((label, i) => [label, ...names.map((name) => tensors[name].data[layer * tensors[name].shape[1] + i])])} />
    <h3>${t("steps.hidden")}</h3><${Heatmap} name="hidden" data=${hidden.data} rows=${rows} columns=${columns} scale="magnitude" rowLabels=${labels} width=${Math.min(width, 640)} height=${Math.min(30 * rows, 340)} maxCell=${22}
      label=${t("steps.matrix", { step: t("steps.hidden"), rows, columns })} />
    <${Caption}>${relu ? t("steps.active", { share: percent(active, 0), columns }) : t("steps.strongest", { share: percent(strongest, 0) })}</${Caption}>`;
}
