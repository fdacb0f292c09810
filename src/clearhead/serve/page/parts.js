// @ts-check
// Small parts that views share: headings, captions, tables, token strips, errors, save buttons.
import { html } from "./html.js";
import { t, visible, number } from "./i18n.js";
import { away } from "./api.js";
import { savePicture } from "./save.js";

/** A side's tokens for labels; parts of a character are numbered. @returns {string[]} */
export function labelsOf(side) {
  return side.pieces.map((piece, i) => {
    const part = side.parts[i];
    return part ? `${visible(piece)}${part[0]}/${part[1]}` : visible(piece);
  });
}

/** A view: its title, what it shows, and its content. */
export function View({ title, lead, children, tools = null }) {
  return html`<section class="view" aria-labelledby="view-title">
    <div class="view-head"><h2 id="view-title">${title}</h2><div class="tools">${tools}</div></div>
    ${lead && html`<p class="lead">${lead}</p>`}
    ${children}
  </section>`;
}

/** Errors that a text or a model can cause: what the server says, and the message of the page. @type {[RegExp, string][]} */
const ERRORS = [
  [/: (?<tokens>[\d,]+) tokens, but this page shows 1 to (?<limit>[\d,]+)/, "error.too_long"],
  [/(?:more|larger) than (?<limit>[\d,]+) bytes/, "error.too_large"],
  [/at most (?<limit>[\d,]+) char/, "error.too_many"],
  [/NaN/, "error.nan"],
  [/tokenizer\.json/, "error.no_tokenizer"],
  [/too many requests/, "error.busy"],
  [/is in none of the texts/, "error.no_word"],
  [/no token in it/, "error.empty"],
];

/** An error of the server in the language of the page; one it has no words for stays in English. */
export function Problem({ error }) {
  for (const [pattern, key] of ERRORS) {
    const found = pattern.exec(error.message);
    if (found) return html`<div class="problem" role="alert"><strong>${t("error.title")}</strong><span>${t(key, found.groups)}</span></div>`;
  }
  return html`<div class="problem" role="alert"><strong>${t("error.title")}</strong><span lang="en">${error.message}</span></div>`;
}

/** What stands in place of a picture while it loads, or where it cannot be made. */
export function Waiting({ error, stale = false }) {
  if (!error) return html`<p class="waiting" aria-busy=${stale}>${t("waiting")}</p>`;
  if (error.code === "away" || away.value) return html`<p class="problem" role="alert">${t("error.away")}</p>`;
  if (error.code === "not_recorded") return html`<p class="problem" role="alert">${t("error.not_recorded")}</p>`;
  return html`<${Problem} error=${error} />`;
}

/** Computed words below a picture. */
export function Caption({ children, live = false }) {
  return html`<p class="caption" aria-live=${live ? "polite" : "off"}>${children}</p>`;
}

/** Numbers as a table, closed until it is asked for; a screen reader finds here what the picture shows. */
export function Numbers({ title, head, rows, limit = 600, open = false }) {
  return html`<details class="numbers" open=${open}><summary>${title}</summary>
    <div class="scroll" tabindex="0" role="region" aria-label=${title}><table>
      <thead><tr>${head.map((each) => (each === "" ? html`<td></td>` : html`<th scope="col">${each}</th>`))}</tr></thead>
      <tbody>${rows.slice(0, limit).map((row) => html`<tr>${row.map((cell, i) =>
        i === 0 ? html`<th scope="row">${cell}</th>` : html`<td>${typeof cell === "number" ? number(cell) : cell}</td>`)}</tr>`)}</tbody>
    </table></div>
    ${rows.length > limit && html`<p class="note">${t("table.more", { count: rows.length - limit })}</p>`}
  </details>`;
}

/** A bar of a share between 0 and 1. */
export function Bar({ value, label = "", cut = false }) {
  return html`<span class=${cut ? "meter cut" : "meter"} role="img" aria-label=${label || number(value)}>
    <span style=${{ width: `${Math.max(0, Math.min(1, value)) * 100}%` }}></span></span>`;
}

/** The numbers of a selection, for the right pane. @param {{title: string, rows: [any, any][]}} props */
export function Facts({ title, rows }) {
  return html`<h3>${title}</h3><dl class="facts-list">${rows.map(([name, value]) => html`<dt>${name}</dt><dd>${value}</dd>`)}</dl>`;
}

/** Buttons that save the pictures of a view. */
export function SaveButtons({ within = ".view" }) {
  return html`<button type="button" class="small" onClick=${() => savePicture(within, "svg")}>${t("save.svg")}</button>
    <button type="button" class="small" onClick=${() => savePicture(within, "png")}>${t("save.png")}</button>`;
}

/** A group of buttons of which one is pressed. @param {{options: [any, any][], value: any, onChange: (value: any) => void, label: string}} props */
export function Choice({ options, value, onChange, label }) {
  return html`<div class="choice" role="group" aria-label=${label}>${options.map(([each, name]) =>
    html`<button type="button" aria-pressed=${each === value} onClick=${() => onChange(each)}>${name}</button>`)}</div>`;
}

/** A slider with its value. */
export function Slider({ label, value, min, max, step, onInput, show = String }) {
  return html`<label class="slider"><span>${label}</span>
    <input type="range" min=${min} max=${max} step=${step} value=${value} onInput=${(e) => onInput(+e.target.value)} />
    <output>${show(value)}</output></label>`;
}
