"""Tokenizers that are loaded in several threads at once."""

import os
from concurrent import futures
from pathlib import Path

from clearhead.text import Tokenizer
from clearhead.text.engine_errors import quiet_stderr
from tests.data.helpers import tokenizer


def test_loading_in_threads_keeps_standard_error(tmp_path: Path) -> None:
    tokenizer("byte-bpe").save(tmp_path)
    before = os.fstat(2)
    with futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: Tokenizer.load(tmp_path), range(8)))
    first, second = quiet_stderr(), quiet_stderr()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert os.path.samestat(os.fstat(2), os.stat(os.devnull))
    second.__exit__(None, None, None)
    assert os.path.samestat(os.fstat(2), before)
