"""The pages of the KV cache: a free list with reference counts, and prefixes that several rows share.

Only full pages are shared, and a row never writes to a full page again; so no page is ever copied. A page of tokens is
known by the pages before it and its own tokens, compared exactly. Pages that no row uses stay known until their memory
is needed, the least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from clearhead.inference.step import PAGE_SIZE, SCRATCH_PAGE

NO_PREFIX = 0  # the prefix before the first page of a text
Key = tuple[int, Hashable]  # the prefix before a page, and its content


class PagePool:
    """Pages 1 to `pages` - 1 of a cache; page 0 is the scratch page."""

    def __init__(self, pages: int):
        self.size = pages - 1 - SCRATCH_PAGE
        self._free = list(range(pages - 1, SCRATCH_PAGE, -1))  # the next one is the last
        self._references = [0] * pages
        self._pages: dict[Key, int] = {}  # known pages
        self._keys: dict[int, tuple[Key, int]] = {}  # of known pages: the key, and the prefix that ends with the page
        self._pending: set[int] = set()  # known pages whose keys and values are still to be computed
        self._idle: OrderedDict[int, None] = OrderedDict()  # known pages without a reference, the oldest first
        self._last_prefix = NO_PREFIX

    @property
    def available(self) -> int:
        """The number of pages that can be allocated."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """The number of pages that rows use."""
        return self.size - self.available

    def allocate(self, count: int) -> list[int]:
        """Return pages with one reference each."""
        assert count <= self.available, "the caller checks that there are pages"
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        self.forget(page)
        return page

    def acquire(self, page: int) -> None:
        """Add a reference to a known page."""
        self._references[page] += 1
        self._idle.pop(page, None)

    def release(self, pages: Sequence[int]) -> None:
        """Remove a reference from each page; the last pages of a text are reused first."""
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page]:
                continue
            if page in self._pending:
                self.forget(page)
            if page in self._keys:
                self._idle[page] = None
            else:
                self._free.append(page)

    def find(self, prefix: int, content: Hashable) -> int | None:
        """Return the page with some content after a prefix."""
        return self._pages.get((prefix, content))

    def is_pending(self, page: int) -> bool:
        """Return whether a known page is still to be computed by the row that allocated it."""
        return page in self._pending

    def prefix_of(self, page: int) -> int:
        """Return the prefix that ends with a known page."""
        return self._keys[page][1]

    def register(self, page: int, prefix: int, content: Hashable, pending: bool = False) -> int:
        """Make a page known, unless another with the same content is; return the prefix that ends with it."""
        key = prefix, content
        if (known := self._pages.get(key)) is not None:
            return self._keys[known][1]
        self._last_prefix += 1
        self._pages[key], self._keys[page] = page, (key, self._last_prefix)
        if pending:
            self._pending.add(page)
        return self._last_prefix

    def mark_computed(self, pages: Sequence[int]) -> None:
        """Let other rows use these pages from the next step on."""
        self._pending.difference_update(pages)

    def forget(self, page: int) -> None:
        """Never share a page again: its content is lost, or was never computed."""
        if (entry := self._keys.pop(page, None)) is not None:
            del self._pages[entry[0]]
            self._pending.discard(page)


def pages_for(tokens: int) -> int:
    """Return how many pages hold some tokens."""
    return -(-tokens // PAGE_SIZE)
