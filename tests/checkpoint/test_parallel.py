"""Checkpoints of one process, DDP and FSDP2 load into each other bit-exactly."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from clearhead.checkpoint import TrainingCheckpoint, gather_state, load_state, newest_checkpoint, write_checkpoint
from clearhead.checkpoint.tensors import named_tensors
from tests.checkpoint.small_models import CONFIG, adam, contents, equal, network, step

UNEVEN = CONFIG.model_copy(update={"dim": 10, "head_dim": 6, "ff_dim": 13})  # as in parallel_worker.py


def test_checkpoints_load_bit_exactly_with_any_world_size(tmp_path: Path) -> None:
    model = network(0, UNEVEN)
    optimizer = adam(model)
    for _ in range(2):
        step(model, optimizer)
    write_checkpoint(tmp_path / "single", 2, *gather_state(model, optimizer), {}, keep=1)

    _two_processes(tmp_path)
    names = named_tensors(model).keys()
    for source in ("single", "ddp", "fsdp"):
        state = newest(tmp_path / source)
        assert state.weights().keys() == names
        assert state.optimizer().keys() == newest(tmp_path / "single").optimizer().keys()
        assert state.optimizer()["exp_avg/decoder.embedding.tokens.weight"].abs().sum() > 0
        for target in ("ddp", "fsdp"):
            assert contents(newest(tmp_path / f"{source}-{target}").folder) == contents(state.folder), (source, target)
        single = network(5, UNEVEN)
        resumed = adam(single)
        load_state(single, resumed, state.weights(), state.optimizer())
        weights, optimizer_tensors = gather_state(single, resumed)
        assert equal(weights, state.weights())
        assert equal(optimizer_tensors, state.optimizer())
    # DDP and FSDP2 trained on the same data; only the order of additions differs.
    ddp, fsdp = (newest(tmp_path / source).weights() for source in ("ddp", "fsdp"))
    for name in names:
        torch.testing.assert_close(fsdp[name], ddp[name], rtol=1e-4, atol=1e-4)


def newest(run: Path) -> TrainingCheckpoint:
    state, _ = newest_checkpoint(run)
    assert state is not None
    return state


def _two_processes(run: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("parallel_worker.py")), str(run)]
    processes = [
        subprocess.Popen([*command, rank], env=environment, stderr=subprocess.PIPE, text=True) for rank in ("0", "1")
    ]
    try:
        for process in processes:
            _, stderr = process.communicate(timeout=120)
            assert process.returncode == 0, stderr
    finally:
        for process in processes:
            process.kill()
