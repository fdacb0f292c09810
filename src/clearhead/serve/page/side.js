// @ts-check
// The right pane: the formula, the numbers of the selected cell, the line of our code, and the lab's verdict.
import { html, signal, useEffect, useState } from "./html.js";
import { state, place, textOf } from "./state.js";
import { get, offline, useFrame } from "./api.js";
import { t, number } from "./i18n.js";
import { Numbers, Problem } from "./parts.js";

/**
 * What a view says about its selection: {step, terms} for a cell of a head; {step, cell} where the view itself has the
 * numbers; {…, more} for what follows; {side} instead of all. @type {any}
 */
export const selection = signal(null);

/** Step → the formula, the route of its code, and the line in it. @type {Record<string, [string, string, string]>} */
export const STEPS = {
  x: ["x = Norm(stream)", "residual", "norm"],
  q: ["q = x W_Q + b_Q", "project_q", "self.query("],
  k: ["k = x W_K + b_K", "project_kv", "self.key"],
  v: ["v = x W_V + b_V", "project_kv", "self.value"],
  rope_q: ["q′ = R(position) q", "rope", "torch.cat"],
  rope_k: ["k′ = R(position) k", "rope", "torch.cat"],
  scores: ["s = q · k", "attention", "scores = q @"],
  scaled: ["s / √E", "attention", "scores = q @"],
  mask: ["s = −∞ where masked", "attention", "masked_fill(~mask"],
  weights: ["a = softmax(s)", "attention", "scores.softmax"],
  output: ["o = Σ a v", "attention", "return weights @ v"],
  update: ["u = o W_O", "merge_heads", "self.output"],
  sum: ["Σ u over heads + b_O", "merge_heads", "self.output"],
  residual: ["stream = stream + attention", "residual", "return x +"],
  feed_forward: ["f(x W_up) W_down", "feed_forward", "self.down"],
  embedding: ["x = E[token] + p[position]", "embedding", "self.tokens(ids)"],
  sampling: ["p = softmax(z / T)", "sampling", "logits / self.temperature"],
  align: ["A = mean a over heads", "alignment", "return weights"],
  beam: ["score = Σ log p / length^α", "beam", "node.penalized = value"],
  forced: ["loss = −mean log p", "loss", "cross_entropy"],
  effect: ["KL = Σ p log(p / p′)", "effect", "divergence ="],
  drops: ["Δ = log p − log p′", "drops", "before * 0"],
  distance: ["½ Σ |a − a′|", "attention", "scores.softmax"],
};
const CELLS = ["q", "k", "v", "rope_q", "rope_k", "scores", "scaled", "weights", "output", "update", "sum"];

const WORDS = ["Norm", "softmax", "stream", "where masked", "over heads", "position", "token", "score", "length", "loss", "mean", "log", "KL", "attention"];

/** Subscripts and letters of a formula, as typeset text; words stand upright. */
function Formula({ text }) {
  return html`<p class="formula">${text.split(/(W_up|W_down|[A-Za-z]_[A-Z]|\^\S)/).map((part) => {
    const [base, below] = part.split("_");
    if (below) return html`<var>${base}</var><sub>${below}</sub>`;
    if (part.startsWith("^")) return html`<sup>${part.slice(1)}</sup>`;
    return part.split(new RegExp(`(${WORDS.join("|")})`)).map((each) => (WORDS.includes(each) ? html`<span>${t(`formula.${each}`)}</span>` : html`<i>${each}</i>`));
  })}</p>`;
}

/** The lines of our source behind a step, the one that computes it marked. */
function Code({ name, mark }) {
  const [code, setCode] = useState(/** @type {any} */ (null));
  useEffect(() => {
    let current = true;
    get(`code/${name}`).then((answer) => current && setCode(answer), () => setCode(null));
    return () => void (current = false);
  }, [name]);
  if (!code) return null;
  const at = Math.max(code.lines.findIndex((line) => line.includes(mark)), 0);
  const quotes = code.lines.flatMap((line, n) => Array.from(line.matchAll(/"""/g), () => n)); // the docstring is left out
  const rest = code.lines.map((_, n) => n).filter((n) => !(quotes.length > 1 && n >= quotes[0] && n <= quotes[1]));
  const near = rest.length <= 14 ? rest : rest.filter((n) => n === 0 || Math.abs(n - at) <= 5);
  const indent = code.lines[0].search(/\S/);
  const line = (n) => html`<span class=${n === at ? "marked" : ""}>${code.lines[n].slice(indent).trimEnd().replace(n === at ? "" : /\s+# .*$/, "") || " "}</span>`;
  return html`<h3>${t("side.code")}</h3><p class="file">${code.file}:${code.line + at}</p>
    <pre class="code" tabindex="0" role="region" aria-label=${t("side.code")}>${near.map((n, i) => [i > 0 && n > near[i - 1] + 1 && html`<span class="gap">⋯</span>`, line(n)])}${near[near.length - 1] < code.lines.length - 1 && html`<span class="gap">⋯</span>`}</pre>`;
}

/** Step → the step whose claim the lab tests. @type {Record<string, string>} */
export const LAB = {
  ...Object.fromEntries(["embedding", "x", "q", "k", "v", "scores", "scaled", "mask", "weights", "sum", "residual", "feed_forward", "sampling", "forced", "effect"].map((each) => [each, each])),
  rope_q: "rope", rope_k: "rope", align: "weights", drops: "weights",
};

/** The claim about a step that the lab tests, and its verdict where the experiment was run. */
function Lab({ step }) {
  const [found, setFound] = useState(/** @type {any} */ (null));
  useEffect(() => {
    let current = true;
    setFound(null);
    if (step in LAB) get(`lab/${LAB[step]}`).then((answer) => current && setFound(answer), () => null);
    return () => void (current = false);
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
  const { frame, error, stale } = useFrame("cell", can ? { ...textOf(), kind, layer, head, step, row, column } : null);
  if (!can) return html`<p class="note">${t("side.pick")}</p>`;
  if (error) return html`<${Problem} error=${error} />`;
  if (!frame || stale) return html`<p class="cell-value stale">…</p>`; // numbers of another cell are not shown under this name
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
  const { side, cell, more } = selection.value ?? {};
  return html`<aside class="side" aria-label=${t("side")}>
    ${side ?? html`<h3>${t(`step.${step}`)}</h3><${Formula} text=${formula} /><p class="note">${t(`step.${step}.note`)}</p>
    ${cell === undefined ? html`<h3>${t("side.cell")}</h3><${Cell} step=${step} />` : cell}
    ${more}<${Code} name=${code} mark=${mark} /><${Lab} step=${step} />`}
  </aside>`;
}
