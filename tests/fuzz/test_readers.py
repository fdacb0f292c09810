"""The inputs that fuzzing found to cover the readers are read again: a result or a UserError, nothing else."""

import shutil

from tests.fuzz.readers import Readers


def test_every_kept_input_is_read_or_refused() -> None:
    readers = Readers()
    try:
        outcomes = [readers.read(data) for data in readers.seeds()]
    finally:
        shutil.rmtree(readers.folder)
    assert len(outcomes) > 200
    assert 20 < sum(outcomes) < len(outcomes) - 100
