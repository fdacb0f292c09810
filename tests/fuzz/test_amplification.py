"""A short campaign of `amplification.py`: no file takes far more memory or time than its size."""

from pathlib import Path

from tests.checkpoint.formats.test_damaged_files import write_models
from tests.fuzz.amplification import Meter, campaign


def test_files_take_memory_and_time_in_proportion_to_their_size(tmp_path: Path) -> None:
    write_models(tmp_path)
    counts, problems = campaign(Meter(tmp_path), 40, seed=1)
    assert not problems, "\n".join(problems)
    assert {name.rpartition(" ")[2] for name in counts} == {"loaded", "refused"}
    assert sum(counts.values()) == 40
