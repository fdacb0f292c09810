"""Length-sorted batches hold every row once, within their limits; worker threads behave like one."""

import signal
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead.config import preset
from clearhead.inference.batches import MAX_DEFAULT_WORKERS, length_batches, raise_if_cancelled, run_in_batches
from clearhead.inference.generate import MAX_BATCH_SIZE, max_batch_size


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), max_size=40), st.integers(1, 100))
def test_batches_hold_every_row_once_within_their_limits(rows: list[tuple[int, int]], max_tokens: int) -> None:
    lengths, max_rows = [length for length, _ in rows], [most for _, most in rows]
    batches = list(length_batches(lengths, max_tokens, max_rows))
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) <= min(max_rows[index] for index in batch)
        assert len(batch) == 1 or len(batch) * max(lengths[index] for index in batch) <= max_tokens
    results = run_in_batches(lengths, max_tokens, max_rows, lambda batch: [-index for index in batch])
    assert results == [-index for index in range(len(lengths))]


def test_the_default_is_one_worker_for_each_thread_and_batch_up_to_two(monkeypatch: pytest.MonkeyPatch) -> None:
    def workers(batches: int, threads: int) -> tuple[int, set[int]]:
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        barrier, thread_counts = threading.Barrier(min(batches, threads, MAX_DEFAULT_WORKERS), timeout=10), set[int]()
        monkeypatch.setattr(torch, "set_num_threads", lambda count: thread_counts.add(count))

        def run(batch: list[int]) -> list[int]:
            if batch[0] < barrier.parties:
                barrier.wait()  # until every worker has a batch
            return [threading.get_ident()]

        return len(set(run_in_batches([1] * batches, 1, [1] * batches, run, 0))), thread_counts

    assert workers(8, threads=1) == (1, set())
    assert workers(1, threads=8) == (1, set())
    assert workers(2, threads=8) == (2, {4, 8})
    assert workers(9, threads=8) == (2, {4, 8})


def test_a_batch_has_as_many_rows_as_the_kv_cache_holds_up_to_a_maximum() -> None:
    network = preset("transformer-base", ["vocab_size=100", "max_positions=512"])
    token_bytes = 6 * 2 * 512 * 4  # layers, keys and values, dim, bytes
    assert max_batch_size(network, 4, 100, 20, 420 * token_bytes * 7) == 7
    assert max_batch_size(network, 4, 100, 20, 1) == 1
    assert max_batch_size(network, 4, 100, 20, 1 << 60) == MAX_BATCH_SIZE
    assert max_batch_size(network, 1, 1 << 20, 8, 520 * token_bytes * 3) == 3, "no row is longer than max_positions"


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_inherit_autocast(workers: int) -> None:
    def run(batch: list[int]) -> list[torch.dtype]:
        return [(torch.ones(1, 1) @ torch.ones(1, 1)).dtype]

    with torch.autocast("cpu", torch.bfloat16):
        assert run_in_batches([1, 1, 1], 1, [1] * 3, run, workers) == [torch.bfloat16] * 3
    assert run_in_batches([1, 1, 1], 1, [1] * 3, run, workers) == [torch.float32] * 3


def test_ctrl_c_ends_all_workers() -> None:
    ended = []

    def run(batch: list[int]) -> list[int]:
        if batch == [1]:
            time.sleep(0.3)  # until all workers are running
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        try:
            while True:
                raise_if_cancelled()
                time.sleep(0.01)
        finally:
            ended.append(batch)

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_in_batches([1] * 9, 1, [1] * 9, run, 2)
    assert len(ended) == 2, "no worker starts another batch"
    assert time.monotonic() - start < 20
