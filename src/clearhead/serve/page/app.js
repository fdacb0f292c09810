// @ts-check
// The page: model and text at the top, the spine of the model at the left, one view in the center, formula and code at the right.
import { html, render, effect, useEffect, useState } from "./html.js";
import { state, models, model, place, go, fromHash, followURL, kindsOf, depth } from "./state.js";
import { get, away, offline } from "./api.js";
import { load, t, LANGUAGES, count, messages } from "./i18n.js";
import { Waiting } from "./parts.js";
import { Spine, Crumbs } from "./spine.js";
import { Side } from "./side.js";
import { exportPage } from "./export.js";

/** Modules of views by name; each is one file in views/ and is loaded when it is first shown. @type {Record<string, any>} */
const loaded = /** @type {any} */ (globalThis).clearheadViews ?? {};
const EVERY_FAMILY = ["tour"];

function useView(name) {
  const [, redraw] = useState(0);
  useEffect(() => {
    if (loaded[name]) return;
    import(`./views/${name}.js`).then(
      (found) => { loaded[name] = found; redraw((x) => x + 1); },
      () => { loaded[name] = { View: () => html`<${Waiting} error=${{ code: "away" }} />` }; redraw((x) => x + 1); },
    );
  }, [name]);
  return loaded[name];
}

function Header() {
  const themes = { "": "light", light: "dark", dark: "" };
  const theme = /** @type {""} */ (state.theme.value);
  return html`<header class="bar">
    <h1 class="mark">Clearhead</h1>
    <label class="model"><span class="hidden">${t("model")}</span>
      <select value=${model.value?.name} onChange=${(e) => choose(e.target.value)}>
        ${models.value.map((each) => html`<option value=${each.name}>${each.name}</option>`)}
      </select></label>
    <span class="facts">${model.value && t("model.facts", { family: t(`family.${model.value.family}`), count: count(model.value.parameters) })}</span>
    <span class="space"></span>
    ${!offline && html`<button type="button" class="small" onClick=${exportPage}>${t("export")}</button>`}
    <button type="button" class="small theme" title=${t("theme.help")} aria-label=${`${t("theme.help")}: ${t(`theme.${theme || "system"}`)}`} onClick=${() => (state.theme.value = themes[theme])}>
      <svg viewBox="0 0 16 16" width="14" height="14" aria-hidden="true"><circle cx="8" cy="8" r="6.5" class=${`sun ${theme}`} /><path d="M8 1.5a6.5 6.5 0 0 1 0 13z" class=${`shade ${theme}`} /></svg><span class="wide">${t(`theme.${theme || "system"}`)}</span></button>
    <div class="choice" role="group" aria-label=${t("language")}>${LANGUAGES.map((each) => html`<button type="button" lang=${each === "zh" ? "zh-CN" : "en"}
      aria-pressed=${state.language.value === each} onClick=${() => (state.language.value = each)}>${each === "en" ? "EN" : "中文"}</button>`)}</div>
  </header>`;
}

/** Show another model with a text of its own. */
export function choose(name) {
  const next = models.value.find((each) => each.name === name);
  if (!next) return;
  const views = [...next.views, ...EVERY_FAMILY];
  const sameFamily = model.value?.family === next.family;
  state.model.value = name;
  state.target.value = null;
  state.appended.value = [];
  state.off.value = [];
  if (!sameFamily || /[\u3400-\u9fff]/.test(next.example) !== /[\u3400-\u9fff]/.test(state.text.value)) state.text.value = next.example;
  go({ kind: "", layer: null, head: null });
  if (!views.includes(state.view.value)) state.view.value = "attention";
}

/** A text area that sets a signal shortly after the last key. */
function TextBox({ label, value, placeholder = "", onText, name }) {
  const [draft, setDraft] = useState(/** @type {string | null} */ (null));
  useEffect(() => {
    if (draft === null || draft === value) return;
    const timer = setTimeout(() => onText(draft), 180);
    return () => clearTimeout(timer);
  }, [draft]);
  useEffect(() => setDraft(null), [value]);
  return html`<label class="text"><span>${label}</span>
    <textarea name=${name} rows="2" spellcheck="false" value=${draft ?? value} placeholder=${placeholder} disabled=${offline}
      onInput=${(e) => setDraft(e.target.value)}></textarea></label>`;
}

function Texts() {
  const family = model.value?.family;
  const set = (text) => {
    state.text.value = text;
    state.appended.value = [];
    if (family === "encoder-decoder") state.target.value = null;
    go({});
  };
  const setTarget = (text) => {
    state.target.value = text === "" ? null : text;
    state.appended.value = [];
    go({});
  };
  return html`<section class="texts" aria-label=${t("texts")}>
    <${TextBox} name="text" label=${t(family === "encoder-decoder" ? "text.source" : "text")} value=${state.text.value} onText=${set} />
    ${family === "encoder-decoder" && html`<${TextBox} name="target" label=${t("text.target")} value=${state.target.value ?? ""} placeholder=${t("text.target.auto")} onText=${setTarget} />`}
    ${family === "encoder" && html`<${TextBox} name="target" label=${t("text.second")} value=${state.target.value ?? ""} placeholder=${t("text.second.none")} onText=${setTarget} />`}
  </section>`;
}

function Tabs({ views }) {
  const move = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[/** @type {"ArrowLeft"} */ (event.key)];
    if (!step) return;
    const next = views[(views.indexOf(state.view.value) + step + views.length) % views.length];
    state.view.value = next;
    requestAnimationFrame(() => document.getElementById(`tab-${next}`)?.focus());
  };
  useEffect(() => document.getElementById(`tab-${state.view.value}`)?.scrollIntoView({ block: "nearest", inline: "nearest" }), [state.view.value]);
  return html`<nav class="tabs" aria-label=${t("views")}><div role="tablist" aria-label=${t("views")} onKeyDown=${move}>${views.map((name) => html`<button
    type="button" role="tab" id=${`tab-${name}`} aria-controls="center" aria-selected=${state.view.value === name} tabindex=${state.view.value === name ? 0 : -1}
    onClick=${() => go({ view: name })}>${titleOf(name)}</button>`)}</div></nav>`;
}

/** The title of a view: a message, or for a view of a user's own, its `title`. */
function titleOf(name) {
  const key = `view.${name}`;
  const own = loaded[name]?.title;
  return messages.en && !(key in messages.en) ? own?.[state.language.value] ?? own?.en ?? name : t(key);
}

function App({ problem }) {
  const views = [...(model.value?.views ?? []), ...EVERY_FAMILY];
  const name = views.includes(state.view.value) ? state.view.value : "attention";
  const view = useView(name);
  useEffect(() => {
    const key = (event) => {
      if (event.key !== "Escape" || /INPUT|TEXTAREA|SELECT/.test(document.activeElement?.tagName ?? "")) return;
      const { layer, head } = place.value;
      if (state.row.value !== null) go({ row: null, column: null });
      else if (head !== null) go({ head: null });
      else if (layer !== null) go({ layer: null });
    };
    addEventListener("keydown", key);
    return () => removeEventListener("keydown", key);
  }, []);
  if (problem) return html`<${Header} /><main><${Waiting} error=${problem} /></main>`;
  if (!model.value) return html`<${Header} /><main><${Waiting} error=${null} /></main>`;
  const content = !model.value.tokenizer && name !== "tour" ? html`<${Waiting} error=${{ message: "tokenizer.json" }} />`
    : view ? html`<${view.View} key=${model.value.name} />` : html`<${Waiting} error=${null} />`;
  const named = !model.value.tokenizer || !(`view.${state.view.value}` in (messages.en ?? {})) || views.includes(state.view.value);
  return html`<${Header} /><${Texts} /><${Tabs} views=${views} />
    ${away.value && html`<p class="problem banner" role="status">${t("error.away")}</p>`}
    ${!named && html`<p class="problem banner" role="status">${t("error.no_view", { view: t(`view.${state.view.value}`), family: t(`family.${model.value.family}`) })}</p>`}
    <div class="body"><${Spine} /><main><div id="center" role="tabpanel" aria-labelledby=${`tab-${name}`} tabindex="-1"><${Crumbs} />
      ${content}</div></main><${Side} /></div>`;
}

async function start() {
  fromHash(location.hash);
  if (!location.hash.includes("lang=")) state.language.value = navigator.language?.startsWith("zh") ? "zh" : "en";
  const root = /** @type {HTMLElement} */ (document.getElementById("app"));
  effect(() => void load(state.language.value));
  effect(() => {
    if (state.theme.value) document.documentElement.dataset.theme = state.theme.value;
    else delete document.documentElement.dataset.theme;
  });
  try {
    const [found] = await Promise.all([get("models"), load("en"), load(state.language.value)]);
    models.value = found.models;
  } catch (error) {
    await load("en").catch(() => null);
    root.replaceChildren();
    render(html`<${App} problem=${error} />`, root);
    setTimeout(() => location.reload(), 3000);
    return;
  }
  if (!model.value) state.model.value = "";
  if (!state.model.value) state.model.value = models.value[0]?.name ?? "";
  if (!state.text.value) state.text.value = model.value?.example ?? "";
  root.replaceChildren();
  render(html`<${App} />`, root);
  followURL();
  performance.mark("shown");
}

start();
export { kindsOf, depth };
