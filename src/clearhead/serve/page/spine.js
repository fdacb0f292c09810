// @ts-check
// The spine: the real layers and heads of the model from input to output, and the breadcrumb of the place that is shown.
import { html } from "./html.js";
import { state, model, place, go, kindsOf, depth } from "./state.js";
import { t } from "./i18n.js";

const VIEWS_OF_HEADS = ["attention", "steps", "compare"];

/** Zoom to a layer or a head, in a view that shows heads. */
export function open(kind, layer, head) {
  const view = VIEWS_OF_HEADS.includes(state.view.value) ? state.view.value : "attention";
  go({ view, kind, layer, head });
}

function Heads({ kind, layer, heads }) {
  const here = place.value;
  return html`<div class="heads">${Array.from({ length: heads }, (_, head) => {
    const on = here.kind === kind && here.layer === layer && here.head === head;
    return html`<button type="button" class=${`dot ${kind}`} aria-current=${on ? "true" : null} onClick=${() => open(kind, layer, head)}
      aria-label=${t("place.head", { kind: t(`kind.${kind}`), layer: layer + 1, head: head + 1 })}
      title=${t("place.head", { kind: t(`kind.${kind}`), layer: layer + 1, head: head + 1 })}></button>`;
  })}</div>`;
}

function Stack({ kind, config }) {
  const layers = depth(config, kind);
  const cross = kind === "decoder" && config.family === "encoder-decoder";
  const here = place.value;
  return html`<div class="stack"><div class="stack-name">${t(`stack.${kind}`)}</div>
    <button type="button" class="part" onClick=${() => go({ view: "tokens" })}>${t("part.embedding")}</button>
    ${Array.from({ length: layers }, (_, layer) => {
      const on = here.layer === layer && (here.kind === kind || (cross && here.kind === "cross"));
      return html`<div class=${on ? "layer on" : "layer"}>
        <button type="button" class="layer-name" onClick=${() => open(kind, layer, null)}>${t("part.layer", { layer: layer + 1 })}</button>
        <${Heads} kind=${kind} layer=${layer} heads=${config.heads} />
        ${cross && html`<${Heads} kind="cross" layer=${layer} heads=${config.heads} />`}
        <span class="ff" title=${t("part.feed_forward")} aria-hidden="true"></span></div>`;
    })}
    ${kind !== "encoder" || config.family === "encoder" ? html`<span class="part">${t("part.output")}</span>` : html`<span class="arrow" aria-hidden="true">${t("part.to_cross")}</span>`}
  </div>`;
}

export function Spine() {
  const config = model.value?.config;
  if (!config) return null;
  const stacks = kindsOf(config).filter((kind) => kind !== "cross");
  return html`<nav class="spine" aria-label=${t("spine")}>${stacks.map((kind) => html`<${Stack} kind=${kind} config=${config} />`)}
    <p class="key">${kindsOf(config).map((kind) => html`<span><i class=${`dot ${kind}`}></i>${t(`kind.${kind}`)}</span>`)}<span><i class="ff"></i>${t("part.feed_forward")}</span></p></nav>`;
}

/** Where we are: model › stack › layer › head › cell; each part leads back to itself. */
export function Crumbs() {
  const { kind, layer, head } = place.value;
  if (!VIEWS_OF_HEADS.includes(state.view.value)) return null;
  const parts = [[model.value.name, () => go({ layer: null, head: null })], [t(`kind.${kind}`), () => go({ kind, layer: null, head: null })]];
  if (layer !== null) parts.push([t("part.layer", { layer: layer + 1 }), () => go({ head: null })]);
  if (head !== null) parts.push([t("part.head", { head: head + 1 }), () => go({})]);
  if (state.row.value !== null) parts.push([t("part.cell", { row: state.row.value + 1, column: (state.column.value ?? 0) + 1 }), () => {}]);
  return html`<nav class="crumbs" aria-label=${t("crumbs")}><ol>${parts.map(([name, to], i) => html`<li>
    ${i === parts.length - 1 ? html`<span aria-current="location">${name}</span>` : html`<button type="button" onClick=${to}>${name}</button>`}</li>`)}</ol></nav>`;
}
