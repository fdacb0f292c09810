// @ts-check
// The width of an element, followed while it changes.
import { useLayoutEffect, useState } from "./html.js";

/** @returns {[any, number]} a ref for the element, and its width in pixels */
export function useWidth(first = 560) {
  const [element, setElement] = useState(/** @type {HTMLElement | null} */ (null)); // a new one after each "computing"
  const [width, setWidth] = useState(first);
  useLayoutEffect(() => {
    if (!element) return;
    const read = () => setWidth(Math.max(200, Math.floor(element.getBoundingClientRect().width)));
    read();
    const observer = new ResizeObserver(read);
    observer.observe(element);
    return () => observer.disconnect();
  }, [element]);
  return [setElement, width];
}
