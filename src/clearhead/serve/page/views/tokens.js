// @ts-check
// Tokens: pieces joined to characters, ids and bytes; neighbors; position encodings; one word in several contexts.
import { html, useEffect, useState } from "../html.js";
import { state, textOf, model, kindsOf } from "../state.js";
import { useFrame } from "../api.js";
import { t, number, visible, count } from "../i18n.js";
import { Heatmap, Legend, extent } from "../draw.js";
import { Caption, Choice, Numbers, SaveButtons, View as Frame, Waiting } from "../parts.js";
import { selection } from "../side.js";
import { useWidth } from "../size.js";

const hex = (bytes) => (bytes ? bytes.map((b) => b.toString(16).padStart(2, "0").toUpperCase()).join(" ") : "–");
const CONTEXTS = {
  en: ["bank", ["She opened an account at the bank.", "They sat on the bank of the river.", "The bank raised its interest rates."]],
  zh: ["打", ["他在打电话。", "孩子们打篮球。", "她打开了门。"]],
};

export function View() {
  const empty = !state.text.value.trim();
  const { frame, error } = useFrame("trace", empty ? null : textOf());
  const spelled = useFrame("tokens", empty ? null : textOf());
  const [chosen, setChosen] = useState(/** @type {[string, number] | null} */ (null));
  useEffect(() => {
    selection.value = { side: html`<h3>${t("tokens.side")}</h3><p class="note">${t("tokens.side.note")}</p>` };
    return () => { selection.value = null; };
  }, [state.language.value]);
  if (empty) return html`<${Frame} title=${t("view.tokens")}><p class="problem" role="alert">${t("error.empty")}</p></${Frame}>`;
  if (!frame) return html`<${Frame} title=${t("view.tokens")}><${Waiting} error=${error} /></${Frame}>`;
  const sides = ["source", "target"].filter((name) => frame.header[name]);
  return html`<${Frame} title=${t("view.tokens")} lead=${t("tokens.lead")} tools=${html`<${SaveButtons} />`}>
    ${sides.map((name) => html`<${Strip} key=${name} name=${name} side=${frame.header[name]} spelled=${spelled.frame?.header[name]} chosen=${chosen} onChoose=${setChosen} several=${sides.length > 1} />`)}
    ${chosen && frame.header[chosen[0]]?.ids.length > chosen[1] && html`<${Neighbors} side=${chosen[0]} position=${chosen[1]} piece=${frame.header[chosen[0]].pieces[chosen[1]]} />`}
    <${Positions} />
    <${Contexts} />
  </${Frame}>`;
}

function Strip({ name, side, spelled, chosen, onChoose, several }) {
  const characters = [...side.texts.join("")].length;
  return html`<h3>${several ? t(`tokens.${name}`) : t("view.tokens")}</h3>
    <div class="strip">${side.ids.map((id, i) => {
      const part = side.parts[i];
      const on = chosen?.[0] === name && chosen[1] === i;
      return html`<button type="button" class=${`token ${side.spans[i] ? "" : "special"} c${i % 4}`} aria-pressed=${on} onClick=${() => onChoose([name, i])}>
        <span class="piece">${visible(side.pieces[i])}${part && html`<sub>${part[0]}/${part[1]}</sub>`}</span><span class="id">${id}</span></button>`;
    })}</div>
    <${Caption}>${t("tokens.caption", { tokens: side.ids.length, characters, ratio: number(characters / side.ids.length, 2) })}</${Caption}>
    ${spelled && html`<${Numbers} title=${t("tokens.table")} head=${[t("position"), t("token"), t("id"), t("spelling"), t("bytes")]}
      rows=${side.ids.map((id, i) => [`${i + 1}`, visible(side.pieces[i]) + (side.parts[i] ? ` (${side.parts[i].join("/")})` : ""), `${id}`, spelled.spellings[i], hex(spelled.bytes[i])])} />`}`;
}

function Neighbors({ side, position, piece }) {
  const { frame, error } = useFrame("neighbors", { ...textOf(), side, position, count: 10 });
  return html`<h3>${t("tokens.neighbors", { token: visible(piece) })}</h3>${!frame ? html`<${Waiting} error=${error} />` : html`
    <ol class="best neighbors">${frame.header.texts.map((text, i) => html`<li><span class="piece">${visible(text)}</span>
      <span class="meter"><span style=${{ width: `${Math.max(0, frame.header.similarities[i]) * 100}%` }}></span></span><span class="num">${number(frame.header.similarities[i])}</span></li>`)}</ol>
    <${Caption}>${t("tokens.neighbors.note")}</${Caption}>`}`;
}

function Positions() {
  const kinds = kindsOf(model.value.config).filter((kind) => kind !== "cross");
  const [kind, setKind] = useState(kinds[0]);
  const { frame, error } = useFrame("positions", { ...textOf(), kind });
  const [ref, width] = useWidth();
  if (!frame) return html`<div ref=${ref}><${Waiting} error=${error} /></div>`;
  const table = frame.tensors.table, position = frame.header.position;
  if (!table) return html`<h3>${t("positions.title")}</h3><p class="note">${t("positions.none")}</p>`;
  const [rows, columns] = table.shape, [low, high] = extent(table.data);
  return html`<div ref=${ref}><h3>${t("positions.title")}</h3>
    ${kinds.length > 1 && position === "learned" && html`<${Choice} label=${t("attention.kind")} value=${kind} options=${kinds.map((each) => [each, t(`stack.${each}`)])} onChange=${setKind} />`}
    <p class="note">${t(`positions.${position}`)}</p>
    <${Heatmap} name="positions" data=${table.data} rows=${rows} columns=${columns} scale="magnitude" width=${Math.min(width, 640)} height=${260} label=${t("positions.label", { rows, columns })} />
    <p class="scale"><${Legend} scale="magnitude" low=${low} high=${high} /> <span class="note">${t("positions.axes", { rows, columns })}</span></p>
    <${Numbers} title=${t("positions.table")} head=${[t("position"), ...Array.from({ length: Math.min(columns, 8) }, (_, c) => `${c + 1}`)]}
      rows=${Array.from({ length: Math.min(rows, 16) }, (_, r) => [`${r}`, ...Array.from({ length: Math.min(columns, 8) }, (_, c) => table.data[r * columns + c])])} /></div>`;
}

function Contexts() {
  const preset = /[\u3400-\u9fff]/.test(state.text.value) ? CONTEXTS.zh : CONTEXTS.en;
  const [word, setWord] = useState(/** @type {string} */ (preset[0]));
  const [texts, setTexts] = useState(/** @type {string} */ ([].concat(/** @type {any} */ (preset[1])).join("\n")));
  const lines = texts.split("\n").map((each) => each.trim()).filter(Boolean).slice(0, 12);
  const ready = lines.length > 0 && word.trim();
  const { frame, error } = useFrame("context", ready ? { model: model.value.name, text: lines[0], others: lines.slice(1), word: word.trim() } : null);
  return html`<h3>${t("context.title")}</h3><p class="note">${t("context.lead")}</p>
    <div class="context-form"><label class="text"><span>${t("context.word")}</span><input value=${word} onChange=${(e) => setWord(e.target.value)} /></label>
    <label class="text"><span>${t("context.texts")}</span><textarea rows="4" value=${texts} onChange=${(e) => setTexts(e.target.value)}></textarea></label></div>
    ${!frame ? html`<${Waiting} error=${error} />` : html`<${Points} frame=${frame} lines=${lines} word=${word} />`}`;
}

function Points({ frame, lines, word }) {
  const { found } = frame.header, points = frame.tensors.points.data, cosines = frame.tensors.cosines, fixed = frame.tensors.static_cosines;
  const n = found.length, scale = Math.max(...Array.from(points, Math.abs), 1e-9);
  const at = (i, axis) => 130 + (axis ? -1 : 1) * (points[2 * i + axis] / scale) * 100;
  const pairs = [];
  for (let i = 0; i < n; i++) for (let j = i + 1; j < n; j++) pairs.push([`${found[i].text + 1} – ${found[j].text + 1}`, number(cosines.data[i * n + j], 3), number(fixed.data[i * n + j], 3)]);
  return html`<div class="context-view"><svg class="drawing points" viewBox="0 0 260 260" role="img" aria-label=${t("context.label", { word })}>
    <rect x="1" y="1" width="258" height="258" class="frame" /><line x1="130" x2="130" y1="10" y2="250" class="axis" /><line y1="130" y2="130" x1="10" x2="250" class="axis" />
    ${found.map((each, i) => html`<g><circle cx=${at(i, 0)} cy=${at(i, 1)} r="6" class="point" /><text x=${at(i, 0) + 9} y=${at(i, 1) + 4}>${each.text + 1}</text></g>`)}
    </svg><div><ol class="lines">${lines.map((line, i) => html`<li class=${found.some((f) => f.text === i) ? "" : "missing"}>${line}</li>`)}</ol>
    <${Numbers} open=${true} title=${t("context.table")} head=${[t("context.pair"), t("context.contextual"), t("context.static")]} rows=${pairs} />
    <${Caption}>${t("context.caption", { word, found: n, of: lines.length })}</${Caption}></div></div>`;
}
export { count };
