// @ts-check
// Switches: turn heads, sublayers, layers, positions or the mask off; what the model then predicts, and which parts matter most.
import { html, useEffect, useMemo, useState } from "../html.js";
import { state, textOf, model, kindsOf, depth } from "../state.js";
import { useFrame } from "../api.js";
import { t, number, percent, visible } from "../i18n.js";
import { Caption, Choice, Facts, Numbers, View as Frame, Waiting, labelsOf } from "../parts.js";
import { selection } from "../side.js";

/** @typedef {{part: string, stack: string, layer: number, head: number}} Part */
const code = (p) => [p.part, p.stack, p.layer, p.head].join(".");
const decode = (text) => {
  const [part, stack, layer, head] = text.split(".");
  return { part, stack, layer: +layer || 0, head: +head || 0 };
};

/** The name of a part in words. */
export function nameOf(p) {
  const stack = t(`stack.${p.stack === "encoder" ? "encoder" : "decoder"}`);
  if (p.part === "head") return t("place.head", { kind: t(`kind.${p.stack}`), layer: p.layer + 1, head: p.head + 1 });
  if (p.part === "positions" || p.part === "mask") return `${stack}: ${t(`part.${p.part}`)}`;
  const names = { attention: t("part.attention"), cross: t("kind.cross"), feed_forward: t("part.feed_forward"), layer: t("part.whole") };
  return `${stack}, ${t("part.layer", { layer: p.layer + 1 })}: ${names[/** @type {"layer"} */ (p.part)]}`;
}

export function View() {
  const off = state.off.value.map(decode), empty = !state.text.value.trim();
  const [group, setGroup] = useState("heads");
  const trace = useFrame("trace", empty ? null : textOf());
  const result = useFrame("switch", empty ? null : { ...textOf(), off });
  const effects = useFrame("effects", empty ? null : { ...textOf(), group });
  useEffect(() => {
    const header = result.frame?.header;
    const facts = header && html`<${Facts} title=${t("switches.without", { count: state.off.value.length })} rows=${[["KL", number(header.effect.divergence, 4)], ...(header.loss === null ? [] : [[t("formula.loss"), `${number(header.loss, 4)} → ${number(header.effect.loss, 4)}`]]), [t("effect.changed"), percent(header.effect.changed, 0)]]} />`;
    selection.value = { step: "effect", cell: facts, more: html`<h3>${t("switches.side")}</h3><p class="note">${t("switches.side.note")}</p>` };
    return () => { selection.value = null; };
  }, [state.language.value, result.frame]);
  const toggle = (p) => {
    const each = code(p);
    state.off.value = state.off.value.includes(each) ? state.off.value.filter((x) => x !== each) : [...state.off.value, each];
  };
  if (empty) return html`<${Frame} title=${t("view.switches")}><p class="problem" role="alert">${t("error.empty")}</p></${Frame}>`;
  const tools = off.length > 0 && html`<button type="button" class="small" onClick=${() => (state.off.value = [])}>${t("switches.all_on")}</button>`;
  return html`<${Frame} title=${t("view.switches")} lead=${t("switches.lead")} tools=${tools}>
    <${Board} toggle=${toggle} effects=${effects.frame?.header.effects} />
    ${result.frame && trace.frame ? html`<${Outcome} frame=${result.frame} trace=${trace.frame.header} off=${off} stale=${result.stale} />` : html`<${Waiting} error=${result.error ?? trace.error} />`}
    <h3>${t("switches.ranking")}</h3><p><${Choice} label=${t("switches.ranking")} value=${group} options=${[["heads", t("switches.heads")], ["parts", t("switches.parts")]]} onChange=${setGroup} /></p>
    ${effects.frame ? html`<${Ranking} header=${effects.frame.header} toggle=${toggle} />` : html`<${Waiting} error=${effects.error} />`}
  </${Frame}>`;
}

function Switch({ part, label, toggle, strength = 0 }) {
  const isOff = state.off.value.includes(code(part));
  return html`<button type="button" class=${isOff ? "switch off" : "switch"} aria-pressed=${isOff} title=${nameOf(part)} aria-label=${t("switches.off", { part: nameOf(part) })} onClick=${() => toggle(part)}>
    ${label}${strength > 0 && html`<span class="strength" style=${{ height: `${Math.min(1, strength) * 100}%` }}></span>`}</button>`;
}

function Board({ toggle, effects }) {
  const config = model.value.config;
  const known = useMemo(() => new Map((effects ?? []).map((e) => [code(e), e.divergence])), [effects]);
  const most = Math.max(...known.values(), 1e-9);
  const strength = (p) => (known.get(code(p)) ?? 0) / most;
  const stacks = kindsOf(config).filter((kind) => kind !== "cross");
  return html`<div class="board">${stacks.map((stack) => html`<section class="board-stack"><h3>${t(`stack.${stack}`)}</h3>
    <div class="board-row"><${Switch} part=${{ part: "positions", stack, layer: 0, head: 0 }} label=${t("part.positions")} toggle=${toggle} strength=${strength({ part: "positions", stack, layer: 0, head: 0 })} />
      ${stack === "decoder" && html`<${Switch} part=${{ part: "mask", stack, layer: 0, head: 0 }} label=${t("part.mask")} toggle=${toggle} strength=${strength({ part: "mask", stack, layer: 0, head: 0 })} />`}</div>
    ${Array.from({ length: depth(config, stack) }, (_, layer) => {
      const of = (part, kind = stack, head = 0) => ({ part, stack: kind, layer, head });
      const row = (kind, part, name) => html`<div class="board-row"><${Switch} part=${of(part, kind)} label=${name} toggle=${toggle} strength=${strength(of(part, kind))} />
        ${Array.from({ length: config.heads }, (_, head) => html`<${Switch} part=${of("head", kind, head)} label=${head + 1} toggle=${toggle} strength=${strength(of("head", kind, head))} />`)}</div>`;
      return html`<div class="board-layer"><${Switch} part=${of("layer")} label=${t("part.layer", { layer: layer + 1 })} toggle=${toggle} strength=${strength(of("layer"))} />
        <div>${row(stack, "attention", t("part.attention"))}${stack === "decoder" && config.family === "encoder-decoder" && row("cross", "cross", t("kind.cross"))}
        <div class="board-row"><${Switch} part=${of("feed_forward")} label=${t("part.feed_forward")} toggle=${toggle} strength=${strength(of("feed_forward"))} /></div></div></div>`;
    })}</section>`)}</div>`;
}

function Outcome({ frame, trace, off, stale }) {
  const { header, tensors } = frame, { effect } = header;
  const side = trace.target ?? trace.source, labels = labelsOf(side);
  const rows = header.before.length === labels.length ? labels : header.before.map((_, i) => `${i + 1}`);
  return html`<div class=${stale ? "outcome stale" : "outcome"} data-divergence=${effect.divergence}>
    <dl class="facts-row"><div><dt>${t("effect.divergence")}</dt><dd>${number(effect.divergence, 4)} <small>nat</small></dd></div>
      ${header.loss !== null && html`<div><dt>${t("effect.loss")}</dt><dd>${number(header.loss, 3)} → ${number(effect.loss, 3)}</dd></div>`}
      <div><dt>${t("effect.changed")}</dt><dd>${percent(effect.changed, 0)}</dd></div></dl>
    ${header.written !== null && html`<div class="beside"><div><h3>${t("switches.whole")}</h3><p class="text-out">${header.written || "∅"}</p></div>
      ${off.length > 0 && html`<div><h3>${t("switches.without", { count: off.length })}</h3><p class="text-out">${header.written_off || "∅"}</p></div>`}</div>`}
    <${Numbers} open=${off.length > 0} title=${t("switches.table")} head=${[t("switches.after_token"), t("switches.before"), "", t("switches.after"), "", ...(tensors.before ? [t("switches.true"), t("switches.true_before"), t("switches.true_after")] : [])]}
      rows=${rows.map((label, i) => {
        const [a, b] = [header.before[i], header.after[i]];
        return [label, visible(a.texts[0]), percent(a.probs[0], 0), html`<span class=${a.ids[0] === b.ids[0] ? "" : "changed"}>${visible(b.texts[0])}</span>`, percent(b.probs[0], 0), ...(tensors.before ? [header.labels[i] < 0 ? "–" : visible(header.label_texts[i]), ...[tensors.before, tensors.after].map((p) => (header.labels[i] < 0 ? "–" : percent(p.data[i], 1)))] : [])];
      })} limit=${200} />
    ${off.length === 0 && html`<${Caption}>${t("switches.none")}</${Caption}>`}</div>`;
}

function Ranking({ header, toggle }) {
  const { effects } = header, most = Math.max(effects[0]?.divergence ?? 0, 1e-9);
  const idle = effects.filter((e) => e.divergence < 0.01).length;
  return html`<ol class="best ranking">${effects.slice(0, 12).map((e) => html`<li><button type="button" class="take" onClick=${() => toggle(e)} aria-pressed=${state.off.value.includes(code(e))}>${nameOf(e)}</button>
    <span class="meter"><span style=${{ width: `${(e.divergence / most) * 100}%` }}></span></span><span class="num">${number(e.divergence, 4)}</span></li>`)}</ol>
    <${Caption}>${t("switches.caption", { idle, of: effects.length })} ${effects.length < header.of ? t("switches.partial", { done: effects.length, of: header.of }) : ""}</${Caption}>
    <${Numbers} title=${t("switches.ranking.table")} head=${[t("switches.part"), t("effect.divergence"), t("effect.changed"), t("effect.loss")]} rows=${effects.map((e) => [nameOf(e), number(e.divergence, 5), percent(e.changed, 0), e.loss === null ? "–" : number(e.loss, 4)])} />`;
}
