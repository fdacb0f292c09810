"""Settings and fixtures shared by all tests: one thread, a fixed hypothesis profile, no torch.compile."""

import os
import signal

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["CLEARHEAD_LANG"] = "en"

import pytest
import torch
from hypothesis import HealthCheck, settings

from clearhead.ops.native.structs import step_library

torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell inherit ignoring it
# Derandomized, and every example seeds torch itself, so that failures are reproducible.
common = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.filter_too_much]}
settings.register_profile("fixed", derandomize=True, max_examples=50, **common)
settings.register_profile("thorough", max_examples=500, **common)  # pytest --hypothesis-profile=thorough
settings.load_profile("fixed")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["native", "torch"])
def between(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test twice: with quantized layers of the native kernels, and of PyTorch ops."""
    if request.param == "torch":
        monkeypatch.setattr("clearhead.inference.optimize.step_library", lambda: None)
    elif step_library() is None:
        pytest.skip("the native step was not compiled here")
    return request.param


@pytest.fixture(autouse=True)
def default_ctrl_c() -> None:
    """Undo the handler of a command that ran in this process, which ends the process once the command is done."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
