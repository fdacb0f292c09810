"""OpenMP threads wait passively, unless the user has set how they wait."""

import os
import subprocess
import sys

import pytest

from clearhead.ops.openmp import USER_SETTINGS


def environment_of_libgomp(**user: str) -> str:
    """What libgomp says that it has read, in a process that imports clearhead, then torch."""
    environment = {name: value for name, value in os.environ.items() if name not in USER_SETTINGS}
    environment |= {"OMP_DISPLAY_ENV": "VERBOSE", "PYTHONPATH": os.pathsep.join(sys.path), **user}
    command = [sys.executable, "-c", "import clearhead, torch"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True).stderr


@pytest.mark.skipif(sys.platform != "linux", reason="torch has libgomp on Linux")
@pytest.mark.parametrize(
    ("user", "spin_count"),
    [({}, "'0'"), ({"GOMP_SPINCOUNT": "77"}, "'77'"), ({"OMP_WAIT_POLICY": "active"}, "'30000000000'")],
)
def test_libgomp_reads_a_spin_count_of_zero_unless_the_user_has_set_it(user: dict[str, str], spin_count: str) -> None:
    assert f"GOMP_SPINCOUNT = {spin_count}" in environment_of_libgomp(**user)
