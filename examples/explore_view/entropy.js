// A view of your own: how spread the attention of each head is, as a bar for each head.
import { html } from "../html.js";
import { state, textOf } from "../state.js";
import { useFrame } from "../api.js";
import { number } from "../i18n.js";
import { View as Frame, Waiting, Numbers } from "../parts.js";

export const title = { en: "Entropy", zh: "熵" };
const LEAD = {
  en: "Bits of entropy of each head's attention, averaged over the queries: 0 looks at one token only.",
  zh: "每个头的注意力的熵（比特），对所有查询取平均：0 表示只看一个词元。",
};

export function View() {
  const { frame, error } = useFrame("entropy", textOf());
  const language = state.language.value;
  if (!frame) return html`<${Frame} title=${title[language]}><${Waiting} error=${error} /></${Frame}>`;
  const { data, shape } = frame.tensors.entropy;
  const rows = Array.from(data, (bits, i) => [`${Math.floor(i / shape[1]) + 1}.${(i % shape[1]) + 1}`, bits]);
  const most = Math.max(...data, 1e-9);
  return html`<${Frame} title=${title[language]} lead=${LEAD[language]}>
    <ol class="best">${rows.map(([name, bits]) => html`<li><span class="piece">${name}</span>
      <span class="meter"><span style=${{ width: `${(100 * bits) / most}%` }}></span></span><span class="num">${number(bits)}</span></li>`)}</ol>
    <${Numbers} title=${title[language]} head=${["", "bits"]} rows=${rows} /></${Frame}>`;
}
