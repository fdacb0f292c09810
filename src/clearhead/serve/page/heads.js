// @ts-check
// A head as a button: its small picture, its number, and how much the predictions change when it is switched off.
import { html, useEffect, useState } from "./html.js";
import { post } from "./api.js";
import { t, number } from "./i18n.js";
import { Thumbnail } from "./draw.js";

/** What a divergence is shown as below a picture. */
export const short = (x) => (x > 0 && x < 0.001 ? "<0.001" : number(x, x < 10 ? 3 : 1));

/**
 * KL divergence by "layer.head", filled layer after layer: the server answers other requests in between.
 * @param {any} body @param {string} kind @param {number} layers @param {number | null} only one layer, or null for all
 * @returns {Record<string, number>}
 */
export function useEffects(body, kind, layers, only = null) {
  const [found, setFound] = useState(/** @type {Record<string, number>} */ ({}));
  useEffect(() => {
    let current = true;
    setFound({});
    (async () => {
      for (let layer = only ?? 0; current && layer < (only === null ? layers : only + 1); layer++) {
        const frame = await post("effects", { ...body, group: "heads", kind, layer }).catch(() => null);
        if (!frame) return;
        const some = Object.fromEntries(frame.header.effects.map((each) => [`${each.layer}.${each.head}`, each.divergence]));
        if (current) setFound((before) => ({ ...before, ...some }));
      }
    })();
    return () => void (current = false);
  }, [JSON.stringify(body), kind, only]);
  return found;
}

/** @param {{data: Uint8Array, rows: number, columns: number, causal: boolean, layer: number, head: number, effects: Record<string, number>, onOpen: () => void, name?: string}} props */
export function HeadButton({ data, rows, columns, causal, layer, head, effects, onOpen, name = "" }) {
  const effect = effects[`${layer}.${head}`], most = Math.max(...Object.values(effects), 1e-9);
  const words = t("attention.open", { layer: layer + 1, head: head + 1 });
  return html`<button type="button" class="thumb" onClick=${onOpen} aria-label=${(name && `${name}: `) + words + (effect === undefined ? "" : `. ${t("effect.off", { change: short(effect) })}`)}>
    <${Thumbnail} data=${data} rows=${rows} columns=${columns} causal=${causal} />
    <span class="thumb-facts"><span>${head + 1}</span><span class="thumb-effect">${effect === undefined ? "" : short(effect)}</span></span>
    <span class="meter"><span style=${{ width: `${((effect ?? 0) / most) * 100}%` }}></span></span></button>`;
}
