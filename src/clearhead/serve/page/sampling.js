// @ts-check
// Temperature, top-k, top-p and min-p on logits, in the order and with the rules of inference/sampling.py.

/** @typedef {{temperature: number, top_k: number, top_p: number, min_p: number}} Sampling */

/** The softmax of logits; −∞ gives 0. */
export function softmax(logits) {
  let high = -Infinity;
  for (let i = 0; i < logits.length; i++) high = Math.max(high, logits[i]);
  const out = new Float64Array(logits.length);
  let sum = 0;
  for (let i = 0; i < logits.length; i++) sum += out[i] = Math.exp(logits[i] - high);
  for (let i = 0; i < logits.length; i++) out[i] /= sum;
  return out;
}

/** Divide by the temperature, and set tokens outside top-k, top-p or min-p to −∞. @param {ArrayLike<number>} logits @param {Sampling} how */
export function filterLogits(logits, how) {
  const out = Float64Array.from(logits, (x) => x / how.temperature);
  const order = Array.from(out.keys()).sort((a, b) => out[b] - out[a] || a - b);
  if (how.top_k > 0 && how.top_k < out.length) {
    const threshold = out[order[how.top_k - 1]];
    for (let i = 0; i < out.length; i++) if (out[i] < threshold) out[i] = -Infinity;
  }
  if (how.top_p < 1) {
    const probs = softmax(out);
    let before = 0;
    for (const token of order) {
      if (before >= how.top_p) out[token] = -Infinity;
      before += probs[token];
    }
  }
  if (how.min_p > 0) {
    const threshold = out[order[0]] + Math.log(how.min_p);
    for (let i = 0; i < out.length; i++) if (out[i] < threshold) out[i] = -Infinity;
  }
  return out;
}
