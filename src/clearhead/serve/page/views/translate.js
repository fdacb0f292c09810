// @ts-check
// Translate: word alignment, the beam search as a tree whose branches can be forced, teacher-forced against free-running.
import { html, useEffect, useMemo, useState } from "../html.js";
import { state, textOf, model, go } from "../state.js";
import { useFrame } from "../api.js";
import { t, number, percent, visible } from "../i18n.js";
import { Heatmap, Legend } from "../draw.js";
import { Caption, Choice, Facts, Numbers, SaveButtons, Slider, View as Frame, Waiting, labelsOf } from "../parts.js";
import { selection } from "../side.js";
import { useWidth } from "../size.js";

const PARTS = ["align", "beam", "forced"];

export function View() {
  const part = PARTS.includes(state.step.value) ? state.step.value : "align";
  useEffect(() => {
    selection.value = { step: part, cell: null };
    return () => { selection.value = null; };
  }, [part, state.language.value]);
  const empty = !state.text.value.trim();
  const tools = html`<${Choice} label=${t("view.translate")} value=${part} options=${PARTS.map((each) => [each, t(`translate.${each}`)])} onChange=${(each) => go({ step: each })} /><${SaveButtons} />`;
  return html`<${Frame} title=${t("view.translate")} lead=${t(`translate.${part}.lead`)} tools=${tools}>
    ${empty ? html`<p class="problem" role="alert">${t("error.empty")}</p>` : part === "align" ? html`<${Alignment} />` : part === "beam" ? html`<${Beam} />` : html`<${Forced} />`}</${Frame}>`;
}

function Alignment() {
  const trace = useFrame("trace", textOf());
  const { frame, error, stale } = useFrame("align", textOf());
  const [words, setWords] = useState(true);
  const [ref, width] = useWidth();
  const header = trace.frame?.header;
  const labels = useMemo(() => header && { source: labelsOf(header.source), target: labelsOf(header.target).slice(1) }, [header]);
  const effects = useFrame("effects", { ...textOf(), group: "heads", kind: "cross" });
  const at = [state.row.value, state.column.value];
  useEffect(() => {
    if (!frame || at[0] === null) return void (selection.value = { step: "align", cell: null });
    const { data, shape } = words ? frame.tensors.words : frame.tensors.weights;
    const [r, c] = [Math.min(at[0], shape[0] - 1), Math.min(at[1] ?? 0, shape[1] - 1)], row = data.subarray(r * shape[1], (r + 1) * shape[1]);
    selection.value = { step: "align", cell: html`<${Facts} title=${t("side.cell")} rows=${[[`A [${r + 1}, ${c + 1}]`, number(row[c], 4)], [t("align.most"), number(Math.max(...row), 4)], [t("align.row_sum"), number(Array.from(row).reduce((a, b) => a + b, 0), 4)]]} />` };
  }, [frame, words, ...at, state.language.value]);
  if (!frame || !header) return html`<div ref=${ref}><${Waiting} error=${error ?? trace.error} /></div>`;
  const table = words ? frame.tensors.words : frame.tensors.weights, [rows, columns] = table.shape;
  const rowLabels = words ? frame.header.target_words : labels?.target, columnLabels = words ? frame.header.source_words : labels?.source;
  if (rows !== rowLabels.length || columns !== columnLabels.length || rows === 0) return html`<div ref=${ref}><${Waiting} error=${null} /></div>`;
  const links = frame.header.links;
  return html`<div ref=${ref} class=${stale ? "stale" : ""}><p><${Choice} label=${t("align.units")} value=${words} options=${[[true, t("align.words")], [false, t("align.tokens")]]} onChange=${setWords} /></p>
    <div class="head-view"><${Heatmap} name="alignment" data=${table.data} rows=${rows} columns=${columns} rowLabels=${rowLabels} columnLabels=${columnLabels} width=${Math.min(width, 560)} height=${520} maxCell=${40}
      selected=${state.row.value === null ? null : [Math.min(state.row.value, rows - 1), Math.min(state.column.value ?? 0, columns - 1)]} onSelect=${(r, c) => go({ row: r, column: c })} label=${t("align.matrix", { rows, columns })} />
    <div class="head-facts"><${HeadEffects} frame=${effects.frame} heads=${frame.header.heads} /><h3>${t("align.links")}</h3><ol class="lines">${links.map(([s, y]) => html`<li><span class="piece">${frame.header.target_words[y]}</span> ← <span class="piece">${frame.header.source_words[s]}</span></li>`)}</ol>
    ${state.row.value !== null && html`<p class="cell">${rowLabels[Math.min(state.row.value, rows - 1)]} ← ${columnLabels[Math.min(state.column.value ?? 0, columns - 1)]}: <strong class="num">${number(table.data[Math.min(state.row.value, rows - 1) * columns + Math.min(state.column.value ?? 0, columns - 1)], 4)}</strong></p>`}</div></div>
    <p class="scale"><${Legend} /></p>
    <${Caption}>${t("align.caption", { heads: frame.header.heads.map(([l, h]) => `${l + 1}.${h + 1}`).join(", ") })}</${Caption}>
    <${Numbers} title=${t("align.table")} head=${["", ...columnLabels]} rows=${rowLabels.map((label, r) => [label, ...columnLabels.map((_, c) => table.data[r * columns + c])])} /></div>`;
}

/** What the predictions lose without each head of the picture: a clear alignment need not be what the model uses. */
function HeadEffects({ frame, heads }) {
  if (!frame) return null;
  const of = (l, h) => frame.header.effects.find((e) => e.layer === l && e.head === h)?.divergence;
  return html`<div class="effect"><h3>${t("align.effects")}</h3><dl>${heads.map(([l, h]) => html`<dt>${t("place.short", { layer: l + 1, head: h + 1 })}</dt><dd>${number(of(l, h), 4)} <small>nat</small></dd>`)}</dl></div>`;
}

function Beam() {
  const [beam, setBeam] = useState(4);
  const [penalty, setPenalty] = useState(1);
  const [prefix, setPrefix] = useState(/** @type {number[]} */ ([]));
  useEffect(() => setPrefix([]), [state.text.value, model.value.name]);
  const { frame, error, stale } = useFrame("beam", { model: model.value.name, text: state.text.value, beam, length_penalty: penalty, prefix });
  const best = frame?.header.hypotheses[0];
  useEffect(() => {
    const node = best && frame?.header.nodes[best.node];
    selection.value = { step: "beam", cell: node ? html`<${Facts} title=${t("beam.best")} rows=${[["Σ log p", number(node.score, 4)], [t("formula.length"), node.step], ["α", number(penalty, 1)], [t("formula.score"), number(best.score, 4)]]} />` : null };
  }, [frame, state.language.value]);
  return html`<div class="beam-options"><${Slider} label=${t("beam.size")} min="1" max="8" step="1" value=${beam} onInput=${setBeam} />
    <${Slider} label=${t("beam.penalty")} min="0" max="2" step="0.1" value=${penalty} onInput=${setPenalty} show=${(x) => number(x, 1)} />
    ${prefix.length > 0 && html`<p>${t("beam.forced")} <span class="piece">${(frame?.header.forced ?? []).map(visible).join("")}</span> <button type="button" class="small" onClick=${() => setPrefix([])}>${t("beam.free")}</button></p>`}</div>
    ${!frame ? html`<${Waiting} error=${error} />` : html`<div class=${stale ? "stale" : ""}><${Tree} header=${frame.header} prefix=${prefix} onForce=${setPrefix} />
    <h3>${t("beam.hypotheses")}</h3><ol class="hypotheses">${frame.header.hypotheses.map((each) => html`<li><span>${each.text}</span><span class="num">${number(each.score, 4)}</span></li>`)}</ol>
    <${Summary} header=${frame.header} />
    <${Numbers} title=${t("beam.table")} head=${[t("beam.step"), t("token"), t("beam.logprob"), t("beam.score"), t("beam.state")]} rows=${frame.header.nodes.map((n) => [`${n.step}`, visible(n.text), n.logprob, n.score, t(`beam.${n.state}`)])} /></div>`}`;
}

function Summary({ header }) {
  const pruned = header.nodes.filter((n) => n.state === "pruned").length;
  const greedy = [];
  for (let parent = -1, step = 1; ; step++) { // the best child of each kept or finished node
    const next = header.nodes.map((n, i) => [n, i]).filter(([n]) => n.parent === parent && n.step === step && n.state !== "pruned").sort((a, b) => b[0].logprob - a[0].logprob)[0];
    if (!next) break;
    greedy.push(next[0]);
    parent = next[1];
  }
  const same = greedy.every((n) => n.best);
  return html`<${Caption}>${t("beam.caption", { nodes: header.nodes.length, pruned })} ${t(same ? "beam.same" : "beam.other")}</${Caption}>`;
}

const NODE = 64, ROW = 44, START = 36; // pixels: a node, from row to row, and where the first column begins

/** The tree from left to right, a column for each step; kept branches first. */
function Tree({ header, prefix, onForce }) {
  const { nodes } = header, [ref, room] = useWidth(720);
  const placed = useMemo(() => {
    const steps = Math.max(...nodes.map((n) => n.step), 1);
    const columns = Array.from({ length: steps }, () => /** @type {any[]} */ ([]));
    nodes.forEach((n, i) => columns[n.step - 1].push({ ...n, i }));
    const order = { kept: 0, finished: 0, pruned: 1 };
    const rowOf = new Map([[-1, 0]]);
    let most = 0;
    for (const column of columns) {
      const shown = [...column.filter((n) => n.state !== "pruned"), ...column.filter((n) => n.state === "pruned").slice(0, 3)];
      shown.sort((a, b) => Number(b.best) - Number(a.best) || order[/** @type {"kept"} */ (a.state)] - order[/** @type {"kept"} */ (b.state)] || (rowOf.get(a.parent) ?? 0) - (rowOf.get(b.parent) ?? 0) || b.score - a.score);
      shown.forEach((n, r) => rowOf.set(n.i, r));
      column.splice(0, column.length, ...shown);
      most = Math.max(most, shown.length);
    }
    const pitch = Math.min(Math.max(Math.floor((room - START - 4) / steps), NODE + 10), NODE + 40);
    return { columns, rowOf, pitch, width: START + steps * pitch, height: most * ROW + 8 };
  }, [nodes, room]);
  const x = (step) => (step === 0 ? 12 : START + (step - 1) * placed.pitch);
  const y = (i) => 24 + (placed.rowOf.get(i) ?? 0) * ROW;
  const force = (node) => {
    const path = [];
    for (let n = node; n; n = n.parent >= 0 ? nodes[n.parent] : null) path.unshift(n.token);
    onForce([...prefix, ...path.filter((token) => !header.eos.includes(token))]);
  };
  return html`<div ref=${ref} class="scroll tree" tabindex="0" role="region" aria-label=${t("beam.tree")}><div class="tree-inner" style=${{ width: `${placed.width}px`, height: `${placed.height}px` }}>
    <svg class="drawing" width=${placed.width} height=${placed.height} viewBox=${`0 0 ${placed.width} ${placed.height}`} aria-hidden="true">
      ${placed.columns.flat().map((n) => {
        const [x1, y1, x2, y2] = [x(n.step - 1) + (n.step === 1 ? 6 : NODE), n.parent < 0 ? y(-1) : y(n.parent), x(n.step), y(n.i)];
        return html`<path key=${n.i} class=${`edge ${n.state} ${n.best ? "best" : ""}`} fill="none" d=${`M${x1} ${y1}C${x1 + 9} ${y1} ${x2 - 9} ${y2} ${x2} ${y2}`} />`;
      })}<circle cx="12" cy=${y(-1)} r="6" class="root" /></svg>
    ${placed.columns.flat().map((n) => html`<button type="button" key=${n.i} class=${`node ${n.state} ${n.best ? "best" : ""}`} style=${{ left: `${x(n.step)}px`, top: `${y(n.i) - 19}px` }} onClick=${() => force(n)}
      title=${t("beam.node", { token: n.text, logprob: number(n.logprob), score: number(n.score) })} aria-label=${t("beam.node.force", { token: n.text, state: t(`beam.${n.state}`), score: number(n.score) })}>
      <span class="piece">${visible(n.text)}</span><span class="num">${number(n.score, 2)}</span></button>`)}</div></div>
    <p class="note key-line">${["best", "kept", "finished", "pruned"].map((each) => html`<span class="key-item"><span class=${`node-key ${each}`}></span>${t(`beam.${each === "pruned" ? "pruned.three" : each}`)}</span>`)}</p>`;
}

function Forced() {
  const { frame, error, stale } = useFrame("forced", textOf());
  useEffect(() => {
    if (!frame) return;
    const { header, tensors } = frame, n = header.labels.length, i = Math.min(header.parting ?? n - 1, n - 1);
    selection.value = { step: "forced", cell: html`<${Facts} title=${t("forced.at", { position: i + 1, token: visible(header.label_texts[i]) })} rows=${[["log p", number(tensors.forced.data[i], 4)], [t("forced.own_history"), number(tensors.free.data[i], 4)],
      [t("forced.mean"), number(header.forced_loss, 4)], [t("forced.mean_own"), number(header.free_loss, 4)]]} />` };
  }, [frame, state.language.value]);
  if (!frame) return html`<${Waiting} error=${error} />`;
  const { header, tensors } = frame, n = header.labels.length;
  const p = (x) => Math.exp(x);
  return html`<div class=${stale ? "stale" : ""}>${state.target.value === null && html`<p class="note">${t("forced.write")}</p>`}
    <div class="scroll" tabindex="0" role="region" aria-label=${t("translate.forced")}><table class="forced"><thead><tr><th scope="col">${t("position")}</th><th scope="col">${t("forced.target")}</th><th scope="col" colspan="2">${t("forced.given")}</th><th scope="col">${t("forced.own")}</th><th scope="col" colspan="2">${t("forced.free")}</th></tr></thead><tbody>
    ${Array.from({ length: n }, (_, i) => html`<tr class=${header.parting !== null && i === header.parting ? "parting" : header.parting !== null && i > header.parting ? "after" : ""}>
      <th scope="row">${i + 1}</th><td class="piece">${visible(header.label_texts[i])}</td>
      <td><span class="meter"><span style=${{ width: `${p(tensors.forced.data[i]) * 100}%` }}></span></span></td><td class="num">${percent(p(tensors.forced.data[i]))}</td>
      <td class="piece">${visible(header.own_texts[i])}</td>
      <td><span class="meter"><span style=${{ width: `${p(tensors.free.data[i]) * 100}%` }}></span></span></td><td class="num">${percent(p(tensors.free.data[i]))}</td></tr>`)}
    </tbody></table></div>
    <${Caption}>${header.parting === null ? t("forced.together") : t("forced.caption", { position: header.parting + 1, target: visible(header.label_texts[header.parting]), own: visible(header.own_texts[header.parting]) })}
      ${" "}${t("forced.loss", { forced: number(header.forced_loss), free: number(header.free_loss), cost: number(header.free_loss - header.forced_loss) })}</${Caption}></div>`;
}
