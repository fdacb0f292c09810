// @ts-check
// One HTML file with the page, the current text's answers and no server: modules become data: URLs of an import map.
import { get, post, raw } from "./api.js";
import { model, place, state, textOf, toHash, kindsOf, depth } from "./state.js";
import { LAB, STEPS } from "./side.js";
import { load, messages } from "./i18n.js";
import { download } from "./save.js";

const base64 = (buffer) => {
  const data = new Uint8Array(buffer);
  let text = "";
  for (let i = 0; i < data.length; i += 32768) text += String.fromCharCode(...data.subarray(i, i + 32768));
  return btoa(text);
};
const source = async (path) => (await fetch(`page/${path}`)).text();
const IMPORT = /((?:from|import)\s*\(?\s*)(["`])(\.{1,2}\/[\w./${}-]+)\2/g;

/** The path that an import names, seen from the folder of the file that has it. */
function resolve(from, to) {
  return new URL(to, `http://x/${from}`).pathname.slice(1);
}

/** All modules that a file imports, with their sources; import paths become names of the import map. */
async function modules(entries) {
  /** @type {Record<string, string>} */
  const found = {};
  const waiting = [...entries];
  while (waiting.length) {
    const path = /** @type {string} */ (waiting.pop());
    if (path in found) continue;
    found[path] = "";
    const text = await source(path);
    found[path] = text.replace(IMPORT, (all, start, quote, to) => {
      if (to.includes("${")) return `${start}${quote}${"clearhead/views/"}${to.slice("./views/".length)}${quote}`;
      const target = resolve(path, to);
      waiting.push(target);
      return `${start}${quote}clearhead/${target}${quote}`;
    });
  }
  return found;
}

/** Ask for what the views of the current text show first, so that it is recorded: bodies as the views write them. */
async function record() {
  const body = textOf(), { config, views, family } = model.value, here = place.value;
  const kinds = kindsOf(config), kind = here.kind || kinds[kinds.length - 1], layer = here.layer ?? 0;
  const { header } = await post("trace", body);
  const asked = ["heads", "parts"].map((group) => post("effects", { ...body, group }));
  asked.push(post("tokens", body), post("switch", { ...body, off: [] }), post("layer", { ...body, kind, layer }));
  for (const each of kinds) for (let l = 0; l < Math.min(depth(config, each), 24); l++) asked.push(post("effects", { ...body, group: "heads", kind: each, layer: l }));
  for (let head = 0; head < Math.min(config.heads, 16); head++) {
    asked.push(post("head", { ...body, kind, layer, head }), post("steps", { ...body, kind, layer, head }));
  }
  asked.push(post("positions", { ...body, kind: kinds[0] }));
  if (views.includes("next")) asked.push(post("next", { ...body, position: header.target.ids.length - 1 }));
  if (views.includes("understand")) asked.push(post("understand", body));
  if (family === "encoder-decoder") {
    asked.push(post("align", body), post("forced", body), post("effects", { ...body, group: "heads", kind: "cross" }));
    asked.push(post("beam", { model: body.model, text: body.text, beam: 4, length_penalty: 1, prefix: [] }));
  }
  for (const route of [...new Set(Object.values(STEPS).map(([, code]) => `code/${code}`)), ...new Set(Object.values(LAB).map((step) => `lab/${step}`))]) asked.push(get(route));
  await Promise.allSettled(asked);
}

/** Write the file and offer it as a download. */
export async function exportPage() {
  await record();
  download(`clearhead-${model.value.name.replace(/[^\w-]+/g, "-")}.html`, new Blob([await exported()], { type: "text/html" }));
}

/** The text of the file. */
export async function exported() {
  const views = [...model.value.views, "tour"];
  const [style, files] = await Promise.all([source("style.css"), modules(["app.js", ...views.map((each) => `views/${each}.js`)]), load("zh"), load("en")]);
  const imports = Object.fromEntries(Object.entries(files).map(([path, text]) =>
    [`clearhead/${path}`, `data:text/javascript;base64,${base64(new TextEncoder().encode(text))}`]));
  const answers = Object.fromEntries([...raw].map(([key, data]) => [key, typeof data === "string" ? data : base64(data)]));
  const json = (value) => JSON.stringify(value).replace(/</g, "\\u003c");
  return `<!doctype html>
<html lang="${state.language.value === "zh" ? "zh-CN" : "en"}"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Clearhead: ${model.value.name.replace(/[<>&"]/g, "")}</title><style>${style}</style>
<script>globalThis.clearheadRecorded = ${json(answers)}; globalThis.clearheadMessages = ${json(messages)};
if (!location.hash) history.replaceState(null, "", ${json(toHash())});</script>
<script type="importmap">${json({ imports })}</script></head>
<body><div id="app"></div><script type="module">import "clearhead/app.js";</script></body></html>`;
}
