// @ts-check
// Pictures of matrices on canvas: cividis for magnitudes, a diverging scale for differences; hover without a redraw.
import { html, useEffect, useLayoutEffect, useRef } from "./html.js";

// Nine points of cividis (Nuñez, Anderton and Renslow 2018), interpolated to 256 colors.
const CIVIDIS = ["00224e", "123570", "3b496c", "575d6d", "707173", "8a8678", "a59c74", "c3b369", "fee838"];
// Blue over white to red-brown, of equal lightness at both ends.
const DIVERGING = ["1b5a99", "6f9ecb", "c3d7ea", "f7f7f5", "efcdbb", "d68c69", "9c4420"];

function table(points) {
  const colors = new Uint32Array(256);
  const parts = points.map((each) => [0, 2, 4].map((at) => parseInt(each.slice(at, at + 2), 16)));
  for (let i = 0; i < 256; i++) {
    const at = (i / 255) * (parts.length - 1);
    const low = Math.min(Math.floor(at), parts.length - 2);
    const [r, g, b] = parts[low].map((x, c) => Math.round(x + (parts[low + 1][c] - x) * (at - low)));
    colors[i] = (255 << 24) | (b << 16) | (g << 8) | r;
  }
  return colors;
}
const SCALES = { magnitude: table(CIVIDIS), weight: table(CIVIDIS), difference: table(DIVERGING) };
const MASKED = 0x00000000;
/** What stands on the canvas of a heatmap, to save it as a drawing. @type {WeakMap<Element, {props: any, layout: any}>} */
export const matrices = new WeakMap();

/** The CSS color of a value between 0 and 1. */
export function color(x, scale = "weight") {
  const c = SCALES[/** @type {"weight"} */ (scale)][Math.round(255 * Math.min(Math.max(x, 0), 1))];
  return `rgb(${c & 255} ${(c >> 8) & 255} ${(c >> 16) & 255})`;
}

/** The smallest and largest value that is shown. @param {ArrayLike<number>} data @param {ArrayLike<number> | null} mask */
export function extent(data, mask = null) {
  let low = Infinity, high = -Infinity;
  for (let i = 0; i < data.length; i++) {
    if (mask && !mask[i]) continue;
    const x = data[i];
    if (x < low && x > -Infinity) low = x;
    if (x > high && x < Infinity) high = x;
  }
  return low > high ? [0, 0] : [low, high];
}

/**
 * Values as an image. Weights are drawn by their square root, so that small ones can be told from none; differences are
 * symmetric around 0. @param {ArrayLike<number>} data @param {ArrayLike<number> | null} mask
 */
export function image(data, rows, columns, scale = "weight", mask = null) {
  const colors = SCALES[/** @type {"weight"} */ (scale)];
  const picture = new ImageData(Math.max(columns, 1), Math.max(rows, 1));
  const out = new Uint32Array(picture.data.buffer);
  const byte = data instanceof Uint8Array;
  let [low, high] = scale === "weight" ? [0, byte ? 255 : 1] : extent(data, mask);
  if (scale === "difference") [low, high] = [-Math.max(-low, high), Math.max(-low, high)];
  const factor = high > low ? 1 / (high - low) : 0;
  for (let i = 0; i < rows * columns; i++) {
    if (mask && !mask[i]) out[i] = MASKED;
    else {
      const x = (data[i] - low) * factor;
      out[i] = colors[Math.max(0, Math.min(255, Math.round(255 * (scale === "weight" ? Math.sqrt(Math.max(x, 0)) : x))))];
    }
  }
  return picture;
}

/** A small picture of one head. @param {{data: Uint8Array, rows: number, columns: number, causal?: boolean}} props */
export function Thumbnail({ data, rows, columns, causal = false }) {
  const canvas = useRef(/** @type {HTMLCanvasElement | null} */ (null));
  useLayoutEffect(() => {
    if (!canvas.current) return;
    [canvas.current.width, canvas.current.height] = [Math.max(columns, 1), Math.max(rows, 1)];
    const mask = causal ? Uint8Array.from(data, (_, i) => +(i % columns <= Math.floor(i / columns))) : null;
    canvas.current.getContext("2d")?.putImageData(image(data, rows, columns, "weight", mask), 0, 0);
  }, [data, rows, columns]);
  return html`<canvas ref=${canvas} class="thumbnail" aria-hidden="true"></canvas>`;
}

const font = (size) => `${size}px "Noto Sans Mono", "Noto Sans Mono CJK SC", ui-monospace, monospace`;

/** Cut a label to a width. */
function fit(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let end = text.length;
  while (end > 1 && pen.measureText(text.slice(0, end) + "…").width > width) end--;
  return text.slice(0, end) + "…";
}

/**
 * A matrix with token labels. Hovering draws a row and a column on a second canvas and calls `onHover`; a click or Enter
 * calls `onSelect`, arrow keys move the selection.
 * @param {{data: ArrayLike<number>, rows: number, columns: number, scale?: string, mask?: ArrayLike<number> | null,
 *   rowLabels?: string[], columnLabels?: string[], label: string, width?: number, height?: number, name?: string,
 *   selected?: [number, number] | null, onSelect?: (r: number, c: number) => void,
 *   onHover?: (r: number | null, c: number | null) => void, maxCell?: number}} props
 */
export function Heatmap(props) {
  const { data, rows, columns, scale = "weight", mask = null, rowLabels, columnLabels, label, selected = null } = props;
  const base = useRef(/** @type {HTMLCanvasElement | null} */ (null));
  const over = useRef(/** @type {HTMLCanvasElement | null} */ (null));
  const at = useRef(/** @type {any} */ (null));
  const layout = measure(rows, columns, rowLabels, columnLabels, props.width ?? 560, props.height ?? 560, props.maxCell ?? 34);
  const { left, top, cw, ch, width, height } = layout;

  useLayoutEffect(() => {
    const canvas = base.current;
    if (canvas) paint(canvas, props, layout);
  }, [data, mask, scale, width, height, rowLabels, columnLabels, document.documentElement.dataset.theme]);

  const mark = (cell) => {
    const canvas = over.current, pen = canvas?.getContext("2d");
    if (!canvas || !pen) return;
    const ratio = devicePixelRatio || 1;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    const style = getComputedStyle(canvas);
    const accent = style.getPropertyValue("--accent-line") || "#d9480f";
    for (const [each, strong] of /** @type {[any, boolean][]} */ ([[selected, true], [cell, false]])) {
      if (!each) continue;
      const [r, c] = each;
      pen.strokeStyle = accent;
      pen.lineWidth = 1;
      pen.globalAlpha = 0.9;
      if (!strong) {
        if (r !== null) pen.strokeRect(left + 0.5, top + r * ch + 0.5, columns * cw - 1, Math.max(ch - 1, 1));
        if (c !== null) pen.strokeRect(left + c * cw + 0.5, top + 0.5, Math.max(cw - 1, 1), rows * ch - 1);
        if (r === null || c === null) continue;
      }
      pen.lineWidth = 2;
      pen.strokeRect(left + c * cw, top + r * ch, Math.max(cw, 3), Math.max(ch, 3));
      if (!strong && (ch < 11 || cw < 11)) { // labels that have no room of their own
        pen.font = font(12);
        const texts = [rowLabels?.[r], columnLabels?.[c]].filter(Boolean).join(" → ");
        const w = Math.min(pen.measureText(texts).width + 10, width);
        const x = Math.min(left + c * cw + 8, width - w), y = Math.max(top + r * ch - 26, 0);
        pen.fillStyle = style.getPropertyValue("--panel");
        pen.fillRect(x, y, w, 20);
        pen.strokeRect(x, y, w, 20);
        pen.fillStyle = style.getPropertyValue("--ink");
        pen.fillText(texts, x + 5, y + 14);
      }
    }
  };
  useEffect(() => {
    const canvas = over.current;
    if (!canvas) return;
    const ratio = devicePixelRatio || 1;
    [canvas.width, canvas.height] = [Math.round(width * ratio), Math.round(height * ratio)];
    mark(at.current);
  }, [width, height, selected?.[0], selected?.[1], data]);

  const cellOf = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const c = Math.floor(((event.clientX - box.left) * (width / box.width) - left) / cw);
    const r = Math.floor(((event.clientY - box.top) * (height / box.height) - top) / ch);
    const inRows = r >= 0 && r < rows, inColumns = c >= 0 && c < columns;
    // On a label there is only a row or a column.
    return inRows && inColumns ? [r, c] : inRows && c < 0 && rowLabels ? [r, null] : inColumns && r < 0 && columnLabels ? [null, c] : null;
  };
  const hover = (cell) => {
    if (cell?.[0] === at.current?.[0] && cell?.[1] === at.current?.[1]) return;
    at.current = cell;
    mark(cell);
    props.onHover?.(cell?.[0] ?? null, cell?.[1] ?? null);
  };
  const key = (event) => {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const move = moves[/** @type {"ArrowUp"} */ (event.key)];
    if (!move || !props.onSelect) return;
    event.preventDefault();
    const [r, c] = selected ?? [0, -move[1]];
    props.onSelect(Math.min(Math.max(r + move[0], 0), rows - 1), Math.min(Math.max(c + move[1], 0), columns - 1));
  };
  return html`<div class="heatmap" style=${{ width: `${width}px`, aspectRatio: `${width} / ${height}` }}>
    <canvas ref=${base} data-name=${props.name ?? "matrix"} aria-hidden="true"></canvas>
    <canvas ref=${over} class="over" role="application" aria-label=${label} tabindex="0" onKeyDown=${key}
      onPointerMove=${(event) => hover(cellOf(event))} onPointerLeave=${() => hover(null)}
      onClick=${(event) => { const cell = cellOf(event); if (cell && cell[0] !== null && cell[1] !== null) props.onSelect?.(cell[0], cell[1]); }}></canvas>
  </div>`;
}

/** Sizes of a heatmap in CSS pixels: labels at the left and on top, cells as large as fits. */
function measure(rows, columns, rowLabels, columnLabels, maxWidth, maxHeight, maxCell) {
  const longest = (labels) =>
    labels ? Math.min(Math.max(...labels.map((each) => [...each].reduce((n, x) => n + (x > "\u2e80" ? 2 : 1), 0)), 1), 14) * 7.3 + 8 : 2;
  let left = rowLabels ? longest(rowLabels) : 2, top = columnLabels ? longest(columnLabels) : 2;
  let cw = (maxWidth - left) / columns, ch = (maxHeight - top) / rows;
  if (rowLabels && columnLabels) cw = ch = Math.min(cw, ch);
  cw = Math.min(cw, maxCell);
  ch = Math.min(ch, maxCell);
  if (cw >= 3) cw = Math.floor(cw);
  if (ch >= 3) ch = Math.floor(ch);
  if (rowLabels && ch < 11) left = 2;
  if (columnLabels && cw < 11) top = 2;
  return { left: Math.round(left), top: Math.round(top), cw, ch, width: Math.ceil(left + cw * columns + 2), height: Math.ceil(top + ch * rows + 2) };
}

/** Draw cells and labels. */
function paint(canvas, props, layout) {
  const { data, rows, columns, scale = "weight", mask = null, rowLabels, columnLabels } = props;
  const { left, top, cw, ch, width, height } = layout;
  matrices.set(canvas, { props, layout });
  const ratio = devicePixelRatio || 1;
  [canvas.width, canvas.height] = [Math.round(width * ratio), Math.round(height * ratio)];
  const pen = canvas.getContext("2d");
  if (!pen) return;
  pen.scale(ratio, ratio);
  const style = getComputedStyle(canvas);
  pen.fillStyle = style.getPropertyValue("--masked");
  pen.fillRect(left, top, columns * cw, rows * ch);
  const small = document.createElement("canvas");
  [small.width, small.height] = [Math.max(columns, 1), Math.max(rows, 1)];
  small.getContext("2d")?.putImageData(image(data, rows, columns, scale, mask), 0, 0);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(small, left, top, columns * cw, rows * ch);
  pen.fillStyle = style.getPropertyValue("--ink");
  if (rowLabels && ch >= 11) {
    pen.font = font(Math.min(13, ch - 1));
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    rowLabels.forEach((text, r) => pen.fillText(fit(pen, text, left - 6), left - 5, top + (r + 0.5) * ch));
  }
  if (columnLabels && cw >= 11) {
    pen.font = font(Math.min(13, cw - 1));
    pen.textAlign = "left";
    pen.textBaseline = "middle";
    columnLabels.forEach((text, c) => {
      if (pen.measureText(text).width <= cw - 2) { // short ones, such as Chinese characters, stand upright
        pen.textAlign = "center";
        pen.fillText(text, left + (c + 0.5) * cw, top - 10);
        pen.textAlign = "left";
        return;
      }
      pen.save();
      pen.translate(left + (c + 0.5) * cw, top - 5);
      pen.rotate(-Math.PI / 2);
      pen.fillText(fit(pen, text, top - 6), 0, 0);
      pen.restore();
    });
  }
}

/** A legend: the colors from the lowest to the highest value. */
export function Legend({ scale = "weight", low = 0, high = 1, digits = 2, masked = "" }) {
  const canvas = useRef(/** @type {HTMLCanvasElement | null} */ (null));
  useLayoutEffect(() => {
    if (!canvas.current) return;
    [canvas.current.width, canvas.current.height] = [256, 1];
    const ramp = Float32Array.from({ length: 256 }, (_, i) => (scale === "difference" ? (2 * i) / 255 - 1 : i / 255));
    canvas.current.getContext("2d")?.putImageData(image(ramp, 1, 256, scale), 0, 0);
  }, [scale]);
  const show = (x) => x.toFixed(digits).replace("-", "−");
  return html`<span class="legend"><span>${show(low)}</span><canvas ref=${canvas} aria-hidden="true"></canvas><span>${show(high)}</span>
    ${masked && html`<span class="swatch masked"></span><span>${masked}</span>`}</span>`;
}
