// @ts-check
// Tokens: pieces joined to characters, ids and bytes; neighbors; position encodings; one word in several contexts.
import { html, useEffect, useState } from "../html.js";
import { state, textOf, model, kindsOf } from "../state.js";
import { useFrame } from "../api.js";
import { t, number, visible } from "../i18n.js";
import { Heatmap, Legend, extent } from "../draw.js";
import { Caption, Choice, Facts, Numbers, SaveButtons, View as Frame, Waiting } from "../parts.js";
import { selection } from "../side.js";
import { useWidth } from "../size.js";

const hex = (bytes) => (bytes ? bytes.map((b) => b.toString(16).padStart(2, "0").toUpperCase()).join(" ") : "–");
const CONTEXTS = {
  en: ["bank", ["She opened an account at the bank.", "The bank raised its interest rates.", "They sat on the bank of the river.", "Trees grow along the bank of the river."]],
  zh: ["打", ["他在打电话。", "她给妈妈打电话。", "孩子们在打球。", "我们去打篮球。"]],
};

export function View() {
  const empty = !state.text.value.trim();
  const { frame, error } = useFrame("trace", empty ? null : textOf());
  const spelled = useFrame("tokens", empty ? null : textOf());
  const [chosen, setChosen] = useState(/** @type {[string, number] | null} */ (null));
  useEffect(() => {
    const side = chosen && frame?.header[chosen[0]], i = chosen ? chosen[1] : 0;
    const facts = side && i < side.ids.length ? html`<${Facts} title=${t("tokens.chosen")} rows=${[[t("token"), visible(side.pieces[i])], [t("id"), side.ids[i]], [t("position"), i + 1], [t("bytes"), hex(spelled.frame?.header[chosen[0]]?.bytes[i])]]} />` : null;
    selection.value = { step: "embedding", cell: facts, more: html`<h3>${t("tokens.side")}</h3><p class="note">${t("tokens.side.note")}</p>` };
    return () => { selection.value = null; };
  }, [state.language.value, chosen, frame, spelled.frame]);
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
  const { found } = frame.header, { points, static_points, cosines, static_cosines } = frame.tensors;
  const n = found.length, pairs = [];
  for (let i = 0; i < n; i++) for (let j = i + 1; j < n; j++) pairs.push([`${found[i].text + 1} – ${found[j].text + 1}`, number(static_cosines.data[i * n + j], 3), number(cosines.data[i * n + j], 3)]);
  return html`<div class="context-view"><div class="plots">
      <${Plot} name=${t("context.static")} points=${static_points.data} found=${found} word=${word} /><${Plot} name=${t("context.contextual")} points=${points.data} found=${found} word=${word} /></div>
    <div><ol class="lines">${lines.map((line, i) => html`<li class=${found.some((f) => f.text === i) ? "" : "missing"}>${line}</li>`)}</ol>
    <${Numbers} open=${true} title=${t("context.table")} head=${[t("context.pair"), t("context.static"), t("context.contextual")]} rows=${pairs} />
    <${Caption}>${t("context.caption", { word, found: n, of: lines.length })}</${Caption}></div></div>`;
}

/** Vectors in two dimensions; numbers of points that coincide stand together. */
function Plot({ name, points, found, word }) {
  const size = 180, half = size / 2, scale = Math.max(...Array.from(points, Math.abs), 1e-6) > 1e-5 ? Math.max(...Array.from(points, Math.abs)) : 1;
  const at = (i, axis) => half + (axis ? -1 : 1) * (points[2 * i + axis] / scale) * (half - 24);
  /** @type {{x: number, y: number, names: number[]}[]} */
  const places = [];
  found.forEach((each, i) => {
    const [x, y] = [at(i, 0), at(i, 1)], near = places.find((p) => Math.hypot(p.x - x, p.y - y) < 2);
    if (near) near.names.push(each.text + 1);
    else places.push({ x, y, names: [each.text + 1] });
  });
  for (const p of places) p.y = Math.min(p.y, size - 12);
  const label = (p) => places.some((o) => o !== p && Math.abs(o.y - p.y) < 12 && Math.abs(o.x - p.x) < 24 && o.x > p.x) || p.x > size - 50;
  return html`<figure class="plot"><svg class="drawing points" viewBox=${`0 0 ${size} ${size}`} role="img" aria-label=${t("context.label", { word, name })}>
    <rect x="0.5" y="0.5" width=${size - 1} height=${size - 1} class="frame" /><line x1=${half} x2=${half} y1="8" y2=${size - 8} class="axis" /><line y1=${half} y2=${half} x1="8" x2=${size - 8} class="axis" />
    ${places.map((p) => html`<g><circle cx=${p.x} cy=${p.y} r="5" class="point" /><text x=${label(p) ? p.x - 9 : p.x + 9} y=${p.y + 4} text-anchor=${label(p) ? "end" : "start"}>${p.names.join(", ")}</text></g>`)}
    </svg><figcaption class="note">${name}</figcaption></figure>`;
}
