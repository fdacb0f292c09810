"""In training, OpenMP threads soon sleep while they wait, unless the user has set how they wait."""

import os
import subprocess
import sys

import pytest

from clearhead.ops.openmp import SPIN_COUNT, USER_SETTINGS


def environment_of_libgomp(*command: str, **user: str) -> str:
    """What libgomp says that it has read."""
    environment = {name: value for name, value in os.environ.items() if name not in USER_SETTINGS}
    environment |= {"OMP_DISPLAY_ENV": "VERBOSE", "PYTHONPATH": os.pathsep.join(sys.path), **user}
    command = (sys.executable, "-m", "clearhead", *command)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True).stderr


@pytest.mark.skipif(sys.platform != "linux", reason="torch has libgomp on Linux")
@pytest.mark.parametrize(
    ("user", "spin_count"),
    [({}, str(SPIN_COUNT)), ({"GOMP_SPINCOUNT": "77"}, "77"), ({"OMP_WAIT_POLICY": "active"}, "30000000000")],
)
def test_libgomp_spins_briefly_in_training_unless_the_user_has_set_it(user: dict[str, str], spin_count: str) -> None:
    settings = ("data.train.count=200", "data.valid.count=10", "tokenizer.vocab_size=300", "data.train.level=1")
    printed = environment_of_libgomp("train", "mini-en-de", *settings, "--dry-run", **user)
    assert f"GOMP_SPINCOUNT = '{spin_count}'" in printed


def test_inference_keeps_the_default_of_libgomp() -> None:
    assert "GOMP_SPINCOUNT = '1000'" not in environment_of_libgomp("fill", "novels-bert", "a [MASK]")
