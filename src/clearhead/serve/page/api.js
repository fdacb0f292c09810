// @ts-check
// Requests to /inspect: binary frames as typed arrays, a cache, errors in words, and the recorded answers of an export.
import { signal, useEffect, useState } from "./html.js";

/** @typedef {{data: Float32Array | Uint8Array | Int32Array, shape: number[]}} Tensor */
/** @typedef {{header: any, tensors: Record<string, Tensor>}} Frame */

const KEPT = 256, KEPT_BYTES = 2e8; // answers, so that going back does not ask again, and the export has them
/** @type {Map<string, Promise<Frame>>} */
const cache = new Map();
/** Raw answers by key, for the export. @type {Map<string, ArrayBuffer | string>} */
export const raw = new Map();
/** Answers inside an exported file; a server gives none. @type {Record<string, string> | undefined} */
const recorded = /** @type {any} */ (globalThis).clearheadRecorded;
export const offline = recorded !== undefined;
/** How often the server was found again after it was away; requests then repeat. */
export const restarts = signal(0);
export const away = signal(false);

export class InspectError extends Error {
  /** @param {string} message @param {string | null} code */
  constructor(message, code = null) {
    super(message);
    this.code = code;
  }
}

const bytesOf = (text) => Uint8Array.from(atob(text), (each) => each.charCodeAt(0)).buffer;

/** Unpack header and tensors of a frame (see serve/inspect/frame.py). @returns {Frame} */
export function unframe(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const types = { float32: Float32Array, uint8: Uint8Array, int32: Int32Array };
  /** @type {Record<string, Tensor>} */
  const tensors = {};
  for (const each of header.tensors) {
    const count = each.shape.reduce((a, b) => a * b, 1);
    const type = types[/** @type {"uint8"} */ (each.dtype)];
    tensors[each.name] = { data: new type(buffer, 4 + length + each.offset, count), shape: each.shape };
  }
  return { header, tensors };
}

async function request(key, route, body) {
  if (recorded) {
    if (!(key in recorded)) throw new InspectError("", "not_recorded");
    return bytesOf(recorded[key]);
  }
  let answer;
  try {
    answer = await fetch(`inspect/${route}`, body === null ? {} : {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
    });
  } catch {
    watch();
    throw new InspectError("", "away");
  }
  if (!answer.ok) {
    const found = await answer.json().catch(() => null);
    throw new InspectError(found?.error?.message ?? `${answer.status}`, found?.error?.code ?? null);
  }
  return answer.arrayBuffer();
}

/** Ask again every second until the server answers, then let all views repeat their requests. */
async function watch() {
  if (away.value) return;
  away.value = true;
  for (;;) {
    await new Promise((done) => setTimeout(done, 1000));
    try {
      await fetch("inspect/models");
      break;
    } catch {
      continue;
    }
  }
  away.value = false;
  restarts.value++;
}

/** A frame from the server or the cache. @returns {Promise<Frame>} */
export function post(route, body) {
  const key = `${route} ${JSON.stringify(body)}`;
  let found = cache.get(key);
  if (!found) {
    found = request(key, route, body).then((buffer) => {
      raw.set(key, buffer);
      return unframe(buffer);
    });
    cache.set(key, found);
    found.catch(() => cache.delete(key));
    let bytes = [...raw.values()].reduce((sum, each) => sum + (typeof each === "string" ? each.length : each.byteLength), 0);
    for (const old of cache.keys()) {
      if (cache.size <= 1 || (cache.size <= KEPT && bytes <= KEPT_BYTES)) break;
      const gone = raw.get(old);
      bytes -= typeof gone === "string" ? gone.length : gone?.byteLength ?? 0;
      cache.delete(old);
      raw.delete(old);
    }
  }
  return found;
}

/** JSON of a GET route. */
export async function get(route) {
  const buffer = await request(`${route} null`, route, null);
  raw.set(`${route} null`, buffer);
  return JSON.parse(new TextDecoder().decode(buffer));
}

/**
 * A frame for a component. While another one loads, the last one stays (`stale`); `body` null asks for nothing.
 * @returns {{frame: Frame | null, error: InspectError | null, stale: boolean}}
 */
export function useFrame(route, body) {
  const key = body === null ? "" : JSON.stringify(body);
  const again = restarts.value;
  const [found, setFound] = useState(/** @type {any} */ ({ key: null, frame: null, error: null }));
  useEffect(() => {
    if (body === null) return void setFound({ key, frame: null, error: null });
    let current = true;
    post(route, body).then(
      (frame) => current && setFound({ key, frame, error: null }),
      (error) => current && setFound({ key, frame: null, error }),
    );
    return () => void (current = false);
  }, [route, key, again]);
  return { frame: found.frame, error: found.error, stale: found.key !== key };
}
