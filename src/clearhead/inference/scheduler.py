"""The scheduler of the engine: which requests run, in which pages, and which tokens of them are next.

First come, first served. A request is admitted when there are pages for its prompt, and gets more as it grows; when
none is left, the request admitted last waits again and is recomputed later. Prompts are computed in chunks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from clearhead.inference.page_pool import NO_PREFIX, PagePool, pages_for
from clearhead.inference.request import EngineRequest
from clearhead.inference.step import PAGE_SIZE

SOURCE = -1  # the prefix before the first page of a source


class Row:
    """A running request: its pages, and how much of it is computed."""

    def __init__(self, request: EngineRequest, number: int, shared: list[int], source_pages: list[int], prefix: int):
        self.request, self.number, self.pages, self.source_pages = request, number, shared, source_pages
        self.must_encode = False
        self.prompt = [*request.prompt, *request.ids]  # to be computed first; new tokens only if it was preempted
        self.cached = len(shared) * PAGE_SIZE  # tokens of the prompt in the KV cache, those of launched steps included
        self.prefix, self.registered = prefix, len(shared)  # of the known pages at its beginning
        self.closed = False

    @property
    def is_prefilling(self) -> bool:
        """Whether a part of the prompt is still to be computed."""
        return self.cached < len(self.prompt)


class Chunk(NamedTuple):
    """The next tokens of a prompt."""

    row: Row
    length: int

    @property
    def is_last(self) -> bool:
        """Whether the prompt ends with the chunk."""
        return self.row.cached + self.length == len(self.row.prompt)


class Scheduler:
    """The waiting and the running requests, and their pages."""

    def __init__(self, pool: PagePool, max_rows: int):
        self.pool = pool
        self.waiting: deque[EngineRequest] = deque()
        self.rows: list[Row] = []  # in the order of admission
        self.preemptions = 0
        self._numbers = list(range(max_rows - 1, -1, -1))

    def admit(self, tokens: int) -> list[Row]:
        """Start waiting requests in their order, until `tokens` of prompts and sources are new; return the rows."""
        admitted: list[Row] = []
        while self.waiting and self._numbers and tokens > 0:
            row = self._start(self.waiting[0])
            if row is None:
                break
            self.waiting.popleft()
            admitted.append(row)
            tokens -= len(row.prompt) - row.cached + len(row.request.source or ())
        return admitted

    def _start(self, request: EngineRequest) -> Row | None:
        """Allocate pages for a request, but for those that others have computed; None if it must wait."""
        tokens = [*request.prompt, *request.ids]
        sources = self._find_source(request.source)
        prefix, shared = self.pool.prefix_of(sources[0]) if sources else NO_PREFIX, list[int]()
        if sources or request.source is None:
            for content in _full_pages(tokens[:-1]):  # the logits after the last token are needed
                if (page := self.pool.find(prefix, content)) is None:
                    break
                if self.pool.is_pending(page):
                    return None  # another row will have computed it soon
                shared.append(page)
                prefix = self.pool.prefix_of(page)
        for page in (*sources, *shared):
            self.pool.acquire(page)
        missing = pages_for(len(tokens)) - len(shared)
        missing_sources = 0 if sources else pages_for(len(request.source or ()))
        if missing + missing_sources + len(self.rows) > self.pool.available:  # a page for each row to go on
            self.pool.release([*sources, *shared])
            return None
        if missing_sources:
            sources = self.pool.allocate(missing_sources)
            prefix = self._register_source(sources, request.source or ())
        row = Row(request, self._numbers.pop(), shared, sources, prefix)
        row.pages, row.must_encode = [*shared, *self.pool.allocate(missing)], missing_sources > 0
        self._register(row, row.prompt, pending=True)
        self.rows.append(row)
        return row

    def _find_source(self, source: Sequence[int] | None) -> list[int]:
        """Return the pages of a source that another request has; no pages if none has."""
        if source is None or (first := self.pool.find(SOURCE, tuple(source))) is None:
            return []
        pages, prefix = [first], self.pool.prefix_of(first)
        for number in range(1, pages_for(len(source))):
            if (page := self.pool.find(prefix, number)) is None:
                return []
            pages.append(page)
        return pages

    def _register_source(self, pages: list[int], source: Sequence[int]) -> int:
        """Make the pages of a source known; return the prefix of texts that belong to it."""
        if (old := self.pool.find(SOURCE, tuple(source))) is not None:  # incomplete
            self.pool.forget(old)
        prefix = self.pool.register(pages[0], SOURCE, tuple(source))
        for number, page in enumerate(pages[1:], start=1):
            self.pool.register(page, prefix, number)
        return prefix

    def _register(self, row: Row, tokens: Sequence[int], pending: bool = False) -> None:
        """Make the full pages of a row known that hold these tokens."""
        contents = _full_pages(tokens[row.registered * PAGE_SIZE :])
        for page, content in zip(row.pages[row.registered :], contents, strict=False):
            row.prefix = self.pool.register(page, row.prefix, content, pending)
            row.registered += 1

    def chunks(self, tokens: int) -> list[Chunk]:
        """Return the next chunks of prompts, of at most `tokens` tokens together."""
        chunks = []
        for row in self.rows:
            if row.is_prefilling and tokens > 0:
                chunk = Chunk(row, min(tokens, len(row.prompt) - row.cached))
                chunks.append(chunk)
                tokens -= chunk.length
        return chunks

    def advance(self, chunk: Chunk) -> None:
        """Count the tokens of a launched chunk: from now on others may share their pages."""
        row, begin = chunk.row, chunk.row.cached // PAGE_SIZE
        row.cached += chunk.length
        self.pool.mark_computed(row.pages[begin : row.cached // PAGE_SIZE])

    def grow(self, row: Row) -> int:
        """Allocate a page for the next token of a row; return it."""
        row.pages += self.pool.allocate(1)
        return row.pages[-1]

    def requeue(self, row: Row) -> None:
        """Let the request of a released row wait again, before all others."""
        self.waiting.appendleft(row.request)
        self.preemptions += 1

    def release(self, row: Row, failed: bool = False) -> None:
        """Free the pages and the number of a row; pages of a failed row are never shared."""
        row.closed = True
        self.rows.remove(row)
        self._numbers.append(row.number)
        if failed:
            for page in (*row.pages, *row.source_pages):
                self.pool.forget(page)
        else:
            known = [*row.request.prompt, *row.request.ids]
            self._register(row, known[: row.cached])
        self.pool.release(row.pages)
        self.pool.release(row.source_pages)


def _full_pages(tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the tokens of each full page."""
    for begin in range(0, len(tokens) - PAGE_SIZE + 1, PAGE_SIZE):
        yield tuple(tokens[begin : begin + PAGE_SIZE])
