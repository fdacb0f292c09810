"""Pages of the KV cache: no page is lost, none is used twice, and only equal prefixes are shared."""

import random

from hypothesis import given
from hypothesis import strategies as st

from clearhead.inference.page_pool import NO_PREFIX, PagePool, pages_for


def test_the_scratch_page_is_never_allocated() -> None:
    pool = PagePool(5)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert (pool.available, pool.used) == (0, 4)


def test_pages_are_shared_by_their_whole_prefix() -> None:
    pool = PagePool(9)
    first, second, other = pool.allocate(3)
    prefix = pool.register(first, NO_PREFIX, (1, 2))
    assert pool.register(second, prefix, (3, 4)) == pool.prefix_of(second)
    other_prefix = pool.register(other, NO_PREFIX, (5, 6))
    assert pool.find(prefix, (3, 4)) == second
    assert pool.find(other_prefix, (3, 4)) is None
    assert pool.find(NO_PREFIX, (3, 4)) is None
    duplicate = pool.allocate(1)[0]
    assert pool.register(duplicate, NO_PREFIX, (1, 2)) == prefix, "equal prefixes continue together"
    pool.release([duplicate])
    assert pool.find(NO_PREFIX, (1, 2)) == first


def test_unused_pages_are_kept_until_their_memory_is_needed() -> None:
    pool = PagePool(4)
    pages = pool.allocate(2)
    prefix = pool.register(pages[0], NO_PREFIX, "a")
    pool.register(pages[1], prefix, "b")
    pool.release(pages)
    assert (pool.available, pool.used) == (3, 0)
    pool.allocate(2)  # the unknown page and the last one of the text
    assert pool.find(NO_PREFIX, "a") == pages[0]
    assert pool.find(prefix, "b") is None
    pool.acquire(pages[0])
    assert pool.available == 0
    pool.release([pages[0]])
    pool.allocate(1)
    assert pool.find(NO_PREFIX, "a") is None


def test_pages_that_were_never_computed_are_forgotten() -> None:
    pool = PagePool(4)
    [page] = pool.allocate(1)
    pool.register(page, NO_PREFIX, "a", pending=True)
    assert pool.is_pending(page)
    pool.release([page])
    assert pool.find(NO_PREFIX, "a") is None
    [page] = pool.allocate(1)
    pool.register(page, NO_PREFIX, "a", pending=True)
    pool.mark_computed([page])
    pool.release([page])
    assert pool.find(NO_PREFIX, "a") == page
    pool.forget(page)


@given(st.integers(0, 1 << 30), st.integers(2, 12))
def test_no_page_is_lost_or_used_twice(seed: int, pages: int) -> None:
    draw, pool, rows = random.Random(seed), PagePool(pages), list[list[int]]()
    for _ in range(60):
        if rows and draw.random() < 0.4:
            pool.release(rows.pop(draw.randrange(len(rows))))
            continue
        prefix, row = NO_PREFIX, []
        for content in [draw.choice("ab") for _ in range(draw.randint(1, 4))]:
            shared = pool.find(prefix, content)
            if shared is not None and not pool.is_pending(shared):
                pool.acquire(shared)
                row.append(shared)
                prefix = pool.prefix_of(shared)
            elif pool.available:
                row += pool.allocate(1)
                prefix = pool.register(row[-1], prefix, content, pending=draw.random() < 0.3)
        rows.append(row)
        if draw.random() < 0.5:
            pool.mark_computed(row)
        assert pool.used == len({page for row in rows for page in row})
    for row in rows:
        pool.release(row)
    assert (pool.used, pool.available) == (0, pages - 1)
    assert sorted(pool.allocate(pages - 1)) == list(range(1, pages))
    assert not pool._keys
    assert not pool._pages


def test_tokens_fill_pages() -> None:
    assert [pages_for(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]
