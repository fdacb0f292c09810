// @ts-check
// The right pane: the formula, the numbers of the selected cell, the line of our code, and the lab's verdict.
import { html, signal, useEffect, useState } from "./html.js";
import { state, place, textOf } from "./state.js";
import { get, offline, useFrame } from "./api.js";
import { t, number } from "./i18n.js";
import { Numbers } from "./parts.js";

/** What a view says about its selection: {step, rows, columns}, the labels of cells. @type {any} */
export const selection = signal(null);

/** Step → the formula, the route of its code, and the line in it. @type {Record<string, [string, string, string]>} */
const STEPS = {
  x: ["x = Norm(stream)", "residual", "norm"],
  q: ["q = x W_Q + b_Q", "project_q", "self.query("],
  k: ["k = x W_K + b_K", "project_kv", "self.key"],
  v: ["v = x W_V + b_V", "project_kv", "self.value"],
  rope: ["q′ = R(position) q", "rope", "torch.cat"],
  scores: ["s = q · k", "attention", "scores = q @"],
  scaled: ["s / √E", "attention", "scores = q @"],
  mask: ["s = −∞ where masked", "attention", "masked_fill(~mask"],
  weights: ["a = softmax(s)", "attention", "scores.softmax"],
  output: ["o = Σ a v", "attention", "return weights @ v"],
  update: ["u = o W_O", "merge_heads", "self.output"],
  sum: ["Σ u over heads + b_O", "merge_heads", "self.output"],
  residual: ["stream = stream + attention", "residual", "return x +"],
  feed_forward: ["f(x W_up) W_down", "feed_forward", "self.down"],
};
const CELLS = ["q", "k", "v", "scores", "scaled", "weights", "output", "update", "sum"];

/** Subscripts and letters of a formula, as typeset text. */
function Formula({ text }) {
  const parts = text.split(/(W_up|W_down|[A-Za-z]_[A-Z])/);
  return html`<p class="formula">${parts.map((part) => {
    const [base, below] = part.split("_");
    return below ? html`<var>${base}</var><sub>${below}</sub>` : part.replace(/Norm|softmax|stream|where masked|over heads|position/g, (x) => `\u200b${x}\u200b`)
      .split("\u200b").map((each) => (/^(Norm|softmax|stream|where masked|over heads|position)$/.test(each) ? html`<span>${t(`formula.${each}`)}</span>` : html`<i>${each}</i>`));
  })}</p>`;
}

/** The lines of our source behind a step, the one that computes it marked. */
function Code({ name, mark }) {
  const [code, setCode] = useState(/** @type {any} */ (null));
  useEffect(() => void get(`code/${name}`).then(setCode, () => setCode(null)), [name]);
  if (!code) return null;
  const at = code.lines.findIndex((line) => line.includes(mark));
  return html`<h3>${t("side.code")}</h3><p class="file">${code.file}:${code.line + Math.max(at, 0)}</p>
    <pre class="code" tabindex="0" role="region" aria-label=${t("side.code")}>${code.lines.map((line, i) => html`<span class=${i === at ? "marked" : ""}>${line}</span>`)}</pre>`;
}

const LAB = ["q", "k", "v", "rope", "scores", "mask", "weights", "sum", "residual", "feed_forward"];

/** The claim about a step that the lab tests, and its verdict where the experiment was run. */
function Lab({ step }) {
  const [found, setFound] = useState(/** @type {any} */ (null));
  useEffect(() => {
    setFound(null);
    if (LAB.includes(step)) get(`lab/${step}`).then(setFound, () => null);
  }, [step]);
  if (!found) return null;
  const language = state.language.value;
  return html`<h3>${t("lab.title")}</h3><p>${found.claim[language] ?? found.claim.en}</p>
    ${found.predictions.length ? html`<ul class="verdicts">${found.predictions.map((each) => html`<li><strong>${t(`lab.${each.outcome}`)}</strong> ${each.text[language]}${" "}
      <span class="note">${number(each.effect)} [${number(each.low)}, ${number(each.high)}], n = ${each.seeds}</span></li>`)}</ul>` : ""}
    <p class="note">${found.here ? "" : t("lab.ours", { hardware: found.hardware })} <code>clearhead lab run ${found.name}</code>
      ${!offline && html` · <a href=${`inspect/lab/report#${found.name}`} target="_blank" rel="noopener">${t("lab.report")}</a>`}</p>`;
}

/** A number as the dot product it is. */
function Cell({ step }) {
  const { kind, layer, head } = place.value;
  const { row, column } = { row: state.row.value, column: state.column.value };
  const can = CELLS.includes(step) && row !== null && column !== null && layer !== null && head !== null;
  const { frame, error } = useFrame("cell", can ? { ...textOf(), kind, layer, head, step, row, column } : null);
  if (!can) return html`<p class="note">${t("side.pick")}</p>`;
  if (error) return html`<p class="problem" lang="en">${error.message}</p>`;
  if (!frame) return null;
  const a = frame.tensors.a.data, b = frame.tensors.b.data, terms = Array.from(a, (x, i) => [i, x, b[i], x * b[i]]);
  const { value, bias } = frame.header;
  const labels = selection.value?.terms?.[step];
  const ranked = terms.slice().sort((x, y) => Math.abs(y[3]) - Math.abs(x[3]));
  const shown = ranked.slice(0, 6), rest = ranked.slice(6).reduce((sum, x) => sum + x[3], 0);
  const name = (i) => labels?.[i] ?? `${i + 1}`;
  return html`<p class="cell-value" data-value=${value}>${t(`step.${step}`)} [${row + 1}, ${column + 1}] = <strong>${number(value, 4)}</strong></p>
    <table class="terms"><thead><tr><th scope="col">${t(`terms.${step}`)}</th><th scope="col">a</th><th scope="col">b</th><th scope="col">a · b</th></tr></thead><tbody>
    ${shown.map(([i, x, y, p]) => html`<tr><th scope="row">${name(i)}</th><td>${number(x)}</td><td>${number(y)}</td><td>${number(p)}</td></tr>`)}
    ${ranked.length > 6 && html`<tr><th scope="row">${t("side.rest", { count: ranked.length - 6 })}</th><td></td><td></td><td>${number(rest)}</td></tr>`}
    ${bias !== null && html`<tr><th scope="row">${t("side.bias")}</th><td></td><td></td><td>${number(bias)}</td></tr>`}
    <tr class="sum"><th scope="row">${t("side.sum")}</th><td></td><td></td><td>${number(value, 4)}</td></tr></tbody></table>
    ${terms.length > 6 && html`<${Numbers} title=${t("side.all", { count: terms.length })} head=${["", "a", "b", "a · b"]} rows=${terms.map(([i, x, y, p]) => [name(i), x, y, p])} />`}`;
}

export function Side() {
  const step = selection.value?.step ?? "weights";
  const [formula, code, mark] = STEPS[step] ?? STEPS.weights;
  const own = selection.value?.side;
  return html`<aside class="side" aria-label=${t("side")}>
    ${own ?? html`<h3>${t(`step.${step}`)}</h3><${Formula} text=${formula} /><p class="note">${t(`step.${step}.note`)}</p>
    <h3>${t("side.cell")}</h3><${Cell} step=${step} />
    <${Code} name=${code} mark=${mark} /><${Lab} step=${step} />`}
  </aside>`;
}
