"""A short campaign of `output_faults.py`: no fault of stdout or stderr ends a run."""

import pytest

from tests.train.output_faults import KINDS, Faults


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    return Faults(tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_finishes_or_saves(kind: str, faults: Faults) -> None:
    faults.attempt(kind)
