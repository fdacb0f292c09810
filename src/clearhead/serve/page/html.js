// @ts-check
// Preact with htm's templates: html`<b>${x}</b>` makes elements without a build step.
import { h, render, Fragment } from "./vendor/preact.js";
import htm from "./vendor/htm.js";

export const html = htm.bind(h);
export { h, render, Fragment };
export { useEffect, useRef, useState, useMemo, useLayoutEffect } from "./vendor/hooks.js";
export { signal, computed, effect, batch } from "./vendor/signals.js";
