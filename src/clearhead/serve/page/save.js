// @ts-check
// Save the pictures of a view: SVG with every cell as a rectangle (an image where there are too many), PNG made from it.
import { image, matrices } from "./draw.js";

const MAX_CELLS = 20000;

/** Offer a file to the browser's download. */
export function download(name, blob) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

const escape = (text) => text.replace(/[&<>"]/g, (x) => `&#${x.charCodeAt(0)};`);

/** The canvases and drawings of a part of the page, with their places. */
function found(within) {
  const root = document.querySelector(within);
  if (!root) return [];
  return [...root.querySelectorAll("canvas:not(.over), svg.drawing")].filter((each) => each.getBoundingClientRect().width > 4);
}

/** Save all pictures of a part of the page as one file. */
export async function savePicture(within, form) {
  const svg = drawing(within);
  if (!svg) return;
  const name = `clearhead-${new URLSearchParams(location.hash.slice(1)).get("v") ?? "view"}`;
  const file = new Blob([svg.text], { type: "image/svg+xml" });
  if (form === "svg") return download(`${name}.svg`, file);
  const picture = new Image();
  picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg.text)}`;
  await picture.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [svg.width * 2, svg.height * 2];
  canvas.getContext("2d")?.drawImage(picture, 0, 0, canvas.width, canvas.height);
  canvas.toBlob((blob) => blob && download(`${name}.png`, blob), "image/png");
}

/** One SVG of all pictures, where they stand on the page. @returns {{text: string, width: number, height: number} | null} */
export function drawing(within) {
  const parts = found(within);
  if (!parts.length) return null;
  const boxes = parts.map((each) => each.getBoundingClientRect());
  const left = Math.min(...boxes.map((b) => b.left)), top = Math.min(...boxes.map((b) => b.top));
  const width = Math.ceil(Math.max(...boxes.map((b) => b.right)) - left), height = Math.ceil(Math.max(...boxes.map((b) => b.bottom)) - top);
  const style = getComputedStyle(document.body);
  const pieces = parts.map((each, i) => {
    const box = boxes[i], x = box.left - left, y = box.top - top;
    if (each instanceof SVGElement) {
      const copy = /** @type {SVGElement} */ (each.cloneNode(true));
      copy.setAttribute("x", `${x}`);
      copy.setAttribute("y", `${y}`);
      copy.setAttribute("width", `${box.width}`);
      copy.setAttribute("height", `${box.height}`);
      inlineStyles(each, copy);
      return new XMLSerializer().serializeToString(copy);
    }
    return cells(/** @type {HTMLCanvasElement} */ (each), x, y, box.width, box.height);
  });
  const paper = style.getPropertyValue("--panel").trim() || "#fff";
  const text = `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}">` +
    `<rect width="100%" height="100%" fill="${escape(paper)}"/>${pieces.join("")}</svg>`;
  return { text, width, height };
}

/** Rectangles of a picture that has one pixel for each cell. */
function rectangles(data, columns, rows, x, y, cw, ch) {
  let out = `<g shape-rendering="crispEdges">`;
  for (let i = 0; i < rows * columns; i++) {
    const at = 4 * i, [r, c] = [Math.floor(i / columns), i % columns];
    if (data[at + 3]) out += `<rect x="${(x + c * cw).toFixed(2)}" y="${(y + r * ch).toFixed(2)}" width="${cw.toFixed(2)}" height="${ch.toFixed(2)}" fill="rgb(${data[at]},${data[at + 1]},${data[at + 2]})"/>`;
  }
  return out + "</g>";
}

/** A heatmap with its labels as text. */
function heatmap({ props, layout }, x, y, size) {
  const { data, rows, columns, scale, mask, rowLabels, columnLabels } = props, { left, top, cw, ch } = layout;
  const style = getComputedStyle(document.body), ink = style.getPropertyValue("--ink").trim();
  const text = (at, label, anchor, turn = "") => `<text ${at} ${turn} text-anchor="${anchor}" dominant-baseline="middle">${escape(label)}</text>`;
  let out = `<g transform="translate(${x} ${y}) scale(${size})"><rect x="${left}" y="${top}" width="${columns * cw}" height="${rows * ch}" fill="${style.getPropertyValue("--masked").trim()}"/>`;
  out += rectangles(image(data, rows, columns, scale, mask).data, columns, rows, left, top, cw, ch);
  out += `<g fill="${ink}" font-family="monospace" font-size="${Math.min(13, Math.max(ch, cw) - 1)}">`;
  if (rowLabels && ch >= 11) rowLabels.forEach((label, r) => { out += text(`x="${left - 5}" y="${top + (r + 0.5) * ch}"`, label, "end"); });
  if (columnLabels && cw >= 11) columnLabels.forEach((label, c) => { out += text("", label, "start", `transform="translate(${left + (c + 0.5) * cw} ${top - 5}) rotate(-90)"`); });
  return out + "</g></g>";
}

/** Heatmaps and small canvases (one pixel a cell) become rectangles, others an embedded picture. */
function cells(canvas, x, y, width, height) {
  const matrix = matrices.get(canvas);
  if (matrix && matrix.props.rows * matrix.props.columns <= MAX_CELLS) return heatmap(matrix, x, y, width / matrix.layout.width);
  const thumbnail = canvas.classList.contains("thumbnail") || canvas.width * canvas.height <= 1024;
  if (!thumbnail || canvas.width * canvas.height > MAX_CELLS)
    return `<image x="${x}" y="${y}" width="${width}" height="${height}" href="${canvas.toDataURL()}"/>`;
  const data = canvas.getContext("2d")?.getImageData(0, 0, canvas.width, canvas.height).data ?? [];
  return rectangles(data, canvas.width, canvas.height, x, y, width / canvas.width, height / canvas.height);
}

function inlineStyles(from, to) {
  const sources = [from, ...from.querySelectorAll("*")], copies = [to, ...to.querySelectorAll("*")];
  sources.forEach((each, i) => {
    const style = getComputedStyle(each);
    for (const name of ["fill", "stroke", "stroke-width", "font-size", "font-family", "font-weight", "opacity", "text-anchor"])
      copies[i].setAttribute(name, style.getPropertyValue(name));
  });
}
