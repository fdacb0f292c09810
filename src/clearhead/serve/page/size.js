// @ts-check
// The width of an element, followed while it changes.
import { useLayoutEffect, useRef, useState } from "./html.js";

/** @returns {[any, number]} a ref for the element, and its width in pixels */
export function useWidth(first = 560) {
  const ref = useRef(/** @type {HTMLElement | null} */ (null));
  const [width, setWidth] = useState(first);
  useLayoutEffect(() => {
    const element = ref.current;
    if (!element) return;
    const read = () => setWidth(Math.max(200, Math.floor(element.getBoundingClientRect().width)));
    read();
    const observer = new ResizeObserver(read);
    observer.observe(element);
    return () => observer.disconnect();
  }, []);
  return [ref, width];
}
