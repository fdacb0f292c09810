"""States gathered from several processes and given to others: the same bits, whatever the number and the engine."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from clearhead.checkpoint import State, gather, newest_state, save_state, scatter
from clearhead.checkpoint.tensors import tensors_of
from tests.checkpoint.small import CONFIG, adam, contents, equal, network, step

WIDE = CONFIG.model_copy(update={"dim": 10, "head_dim": 6, "ff_dim": 13})  # as in parallel.py


def test_states_move_between_one_process_and_two_to_the_bit(tmp_path: Path) -> None:
    made = network(0, WIDE)
    optimizer = adam(made)
    for _ in range(2):
        step(made, optimizer)
    save_state(tmp_path / "single", 2, *gather(made, optimizer), {}, keep=1)

    _two_processes(tmp_path)
    names = tensors_of(made).keys()
    for kind in ("single", "ddp", "fsdp"):
        state = _state(tmp_path / kind)
        assert state.weights().keys() == names
        assert state.optimizer().keys() == _state(tmp_path / "single").optimizer().keys()
        assert state.optimizer()["exp_avg/decoder.embedding.tokens.weight"].abs().sum() > 0
        for other in ("ddp", "fsdp"):
            assert contents(_state(tmp_path / f"{kind}-{other}").folder) == contents(state.folder), (kind, other)
        one = network(5, WIDE)
        resumed = adam(one)
        scatter(one, resumed, state.weights(), state.optimizer())
        weights, moments = gather(one, resumed)
        assert equal(weights, state.weights())
        assert equal(moments, state.optimizer())
    # Both engines trained on the same data; only the order of sums differs.
    ddp, fsdp = (_state(tmp_path / kind).weights() for kind in ("ddp", "fsdp"))
    for name in names:
        torch.testing.assert_close(fsdp[name], ddp[name], rtol=1e-4, atol=1e-4)


def _state(run: Path) -> State:
    state, _ = newest_state(run)
    assert state is not None
    return state


def _two_processes(run: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("parallel.py")), str(run)]
    begun = [
        subprocess.Popen([*command, rank], env=environment, stderr=subprocess.PIPE, text=True) for rank in ("0", "1")
    ]
    try:
        for process in begun:
            _, said = process.communicate(timeout=120)
            assert process.returncode == 0, said
    finally:
        for process in begun:
            process.kill()
