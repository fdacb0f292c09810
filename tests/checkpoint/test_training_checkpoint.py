"""Training checkpoints: exact resume, which one is loaded and which are deleted, the run lock, optimizer state."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from clearhead.checkpoint import (
    average_weights,
    gather_state,
    load_optimizer_state,
    load_state,
    newest_checkpoint,
    optimizer_state,
    read_checkpoint,
    run_lock,
    save_model,
    write_checkpoint,
)
from clearhead.checkpoint.tensors import named_tensors
from clearhead.errors import UserError
from tests.checkpoint.small_models import adam, contents, equal, network, step, tokenizer, trained
from tests.strategies import tokens

NUMBERS = {"position": 12, "epoch": 3, "scale": 0.1 + 0.2, "digest": "0a1b", "files": [1, [2, 3]], "best": None}


def save(run: Path, number: int, keep: int = 3, seed: int = 0) -> Path:
    return write_checkpoint(run, number, *gather_state(*trained(seed)), NUMBERS | {"seed": seed}, keep)


def step_folders(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_a_resumed_run_is_bit_exact(tmp_path: Path) -> None:
    model, optimizer = trained()
    write_checkpoint(tmp_path, 2, *gather_state(model, optimizer), NUMBERS, keep=1)
    state, errors = newest_checkpoint(tmp_path)
    assert state is not None
    assert (state.step, state.progress, errors) == (2, NUMBERS, [])
    other = network(5)
    resumed = torch.optim.AdamW(list(other.parameters())[::-1], lr=0.01)  # another order, one group
    for group in resumed.param_groups:
        group["weight_decay"] = 0.0
    load_state(other, resumed, state.weights(), state.optimizer())
    assert equal(named_tensors(other), named_tensors(model))
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    tensors = state.optimizer()
    load_optimizer_state(other, resumed, tensors)
    for _ in range(3):
        ids = tokens(2, 5)
        step(model, optimizer, ids)
        step(other, resumed, ids)
    assert equal(named_tensors(other), named_tensors(model))
    assert equal(optimizer_state(other, resumed), optimizer_state(model, optimizer))
    assert equal(tensors, state.optimizer()), "the optimizer works on a copy"
    read_checkpoint(state.folder)


def test_only_safetensors_and_json_are_written(tmp_path: Path) -> None:
    folder = save(tmp_path, 100)
    assert folder == tmp_path / "checkpoints" / "step-00000100"
    assert sorted(contents(folder)) == ["manifest.json", "optimizer.safetensors", "state.json", "weights.safetensors"]


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    for number in (5, 20, 100, 110):
        save(tmp_path, number, keep=2)
    assert step_folders(tmp_path) == ["step-00000100", "step-00000110"]
    save(tmp_path, 110, keep=1, seed=7)  # the same step again
    assert step_folders(tmp_path) == ["step-00000110"]
    state, _ = newest_checkpoint(tmp_path)
    assert state is not None
    assert state.progress["seed"] == 7
    with pytest.raises(ValueError, match="keep one or more"):
        save(tmp_path, 120, keep=0)


def test_a_damaged_newer_checkpoint_is_named_and_the_previous_one_loaded(tmp_path: Path) -> None:
    for number in (100, 200, 300):
        save(tmp_path, number)
    weights = tmp_path / "checkpoints" / "step-00000300" / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    state, errors = newest_checkpoint(tmp_path)
    assert state is not None
    assert state.step == 200
    assert errors == [f"{weights} is damaged (SHA-256 differs)"]
    # The damaged one is not counted by `keep`, and replaced when the run reaches its step.
    save(tmp_path, 250, keep=1)
    assert step_folders(tmp_path) == ["step-00000250", "step-00000300"]
    assert newest_checkpoint(tmp_path)[0].step == 250  # type: ignore[union-attr]
    save(tmp_path, 300, keep=1)
    assert step_folders(tmp_path) == ["step-00000300"]
    state, errors = newest_checkpoint(tmp_path)
    assert state is not None
    assert (state.step, errors) == (300, [])


def test_if_every_checkpoint_is_damaged_all_are_named(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) == (None, [])
    for number in (1, 2):
        (save(tmp_path, number) / "optimizer.safetensors").unlink()
    (tmp_path / "checkpoints" / "step-3").mkdir()
    (tmp_path / "checkpoints" / "step-four").mkdir()
    (tmp_path / "checkpoints" / ".step-00000005.tmp-77").mkdir()
    state, errors = newest_checkpoint(tmp_path)
    assert state is None
    assert [line.replace(str(tmp_path / "checkpoints"), "") for line in errors] == [
        "/step-3/manifest.json is missing",
        "/step-00000002/optimizer.safetensors is missing",
        "/step-00000001/optimizer.safetensors is missing",
    ]


def test_a_renamed_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    folder.rename(folder.with_name("step-00000009"))
    assert "is for step 1, so the folder was renamed" in newest_checkpoint(tmp_path)[1][0]


def test_values_that_json_does_not_support_leave_no_files(tmp_path: Path) -> None:
    for wrong in (float("nan"), object()):
        with pytest.raises((ValueError, TypeError)):
            write_checkpoint(tmp_path, 1, {}, {}, {"loss": wrong}, keep=1)
    assert step_folders(tmp_path) == []


def test_optimizer_state_has_the_names_of_the_parameters() -> None:
    model, optimizer = trained()
    state = optimizer_state(model, optimizer)
    assert state["exp_avg/decoder.layers.0.attention.query.weight"].shape == (8, 8)
    assert state["step/decoder.norm.bias"] == 2
    assert len(state) == 3 * len(list(model.parameters()))


OPTIMIZERS: list[Any] = [
    lambda parameters: torch.optim.AdamW(parameters, amsgrad=True),
    lambda parameters: torch.optim.AdamW(parameters, fused=True),
    lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    lambda parameters: torch.optim.Adafactor(parameters),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_any_torch_optimizer_resumes_bit_exactly(make: Any, tmp_path: Path) -> None:
    model, other = network(), network(1)
    optimizer, resumed = make(model.parameters()), make(other.parameters())
    step(model, optimizer)
    write_checkpoint(tmp_path, 1, *gather_state(model, optimizer), {}, keep=1)
    state, _ = newest_checkpoint(tmp_path)
    assert state is not None
    load_state(other, resumed, state.weights(), state.optimizer())
    ids = tokens(2, 5)
    step(model, optimizer, ids)
    step(other, resumed, ids)
    assert equal(named_tensors(other), named_tensors(model))


def test_a_parameter_without_gradient_has_no_optimizer_state_after_loading() -> None:
    model, _ = trained()
    optimizer = adam(model)
    model.decoder.norm.weight.requires_grad_(False)  # type: ignore[union-attr]
    step(model, optimizer)
    other = network()
    resumed = adam(other)
    step(other, resumed)
    load_optimizer_state(other, resumed, optimizer_state(model, optimizer))
    assert other.decoder.norm.weight not in resumed.state  # type: ignore[union-attr]
    assert len(resumed.state) == len(optimizer.state)


def test_optimizer_state_that_does_not_fit_is_named_and_not_loaded() -> None:
    model, optimizer = trained()
    state = optimizer_state(model, optimizer)
    before = {name: tensor.clone() for name, tensor in state.items()}
    name = "decoder.norm.weight"
    for change, message in (
        ({f"exp_avg_sq/{name}": None}, f"exp_avg_sq/{name} is missing"),
        ({f"{key}/{name}": None for key in ("step", "exp_avg", "exp_avg_sq")}, f"nothing is stored for {name}"),
        ({"exp_avg/other": torch.zeros(1)}, "other is not a parameter of this model"),
        ({f"exp_avg/{name}": torch.zeros(9)}, rf"exp_avg/{name} has shape \(9,\) instead of \(8,\)"),
        ({f"exp_avg/{name}": torch.zeros(0)}, rf"exp_avg/{name} has shape \(0,\)"),
        ({f"exp_avg/{name}": torch.zeros(8).to(torch.float8_e5m2)}, rf"exp_avg/{name} holds torch.float8_e5m2"),
        ({f"exp_avg/{name}": torch.zeros(8, 8)}, rf"exp_avg/{name} has shape \(8, 8\)"),
        ({f"exp_avg/{name}": torch.zeros(())}, rf"exp_avg/{name} has shape \(\)"),
        ({f"step/{name}": torch.zeros(8)}, rf"step/{name} has shape \(8,\) instead of \(\)"),
        ({f"exp_avg/{name}": torch.zeros(8, dtype=torch.int64)}, "holds torch.int64 instead of torch.float32"),
        ({f"exp_inf/{name}": torch.zeros(8)}, f"exp_inf/{name} is not a tensor of this optimizer"),
        ({key: None for key in state if key.startswith("exp_avg/")}, "exp_avg/.* is missing"),
    ):
        wrong = {key: value for key, value in (state | change).items() if value is not None}  # type: ignore[operator]
        with pytest.raises(UserError, match=message):
            load_optimizer_state(model, optimizer, wrong)
    assert equal(optimizer_state(model, optimizer), before)
    with pytest.raises(ValueError, match="the optimizer holds a parameter that the network does not have"):
        optimizer_state(network(), optimizer)


def test_a_second_training_process_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "new" / "run"
    with run_lock(run):
        with pytest.raises(UserError, match=f"process {os.getpid()} is training here"), run_lock(run):
            pass
        code = f"""if True:
            from pathlib import Path
            from clearhead.checkpoint import run_lock
            with run_lock(Path({str(run)!r})): pass"""
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert f"UserError: {run}: process {os.getpid()} is training here; wait until it ends" in other.stderr
    with run_lock(run):
        pass


def test_a_forked_worker_does_not_keep_the_lock_of_a_killed_trainer(tmp_path: Path) -> None:
    """A data worker can outlive a killed trainer by seconds, in which training may be restarted."""
    wait_end, release_end = os.pipe()
    ready_end, signal_end = os.pipe()
    trainer = os.fork()
    if trainer == 0:
        with run_lock(tmp_path):
            if os.fork() == 0:
                os.write(signal_end, b"x")
                os.read(wait_end, 1)
                os._exit(0)
            os.read(ready_end, 1)  # the worker is running
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(trainer, 0)
    try:
        with run_lock(tmp_path):
            pass
    finally:
        os.write(release_end, b"x")


def test_the_run_lock_cleans_up_after_killed_processes(tmp_path: Path) -> None:
    save(tmp_path, 1)
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / f".step-00000002.tmp-{os.getppid()}").mkdir()  # under the lock, no other process writes
    (tmp_path / ".best.tmp-99").mkdir()
    save_model(tmp_path / "best", network(), tokenizer())
    (tmp_path / "best").rename(tmp_path / ".best.old")
    (tmp_path / ".notes.old").write_text("a file of the user's")
    with run_lock(tmp_path):
        assert step_folders(tmp_path) == ["step-00000001"]
        assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", ".notes.old", "best", "checkpoints"]


def test_averaging_is_exact_in_fp64(tmp_path: Path) -> None:
    states = [save(tmp_path, number, seed=number) for number in (1, 2, 3)]
    weights = [named_tensors(trained(number)[0]) for number in (1, 2, 3)]
    averaged = average_weights(states)
    for name in weights[0]:
        exact = torch.stack([each[name].detach().double() for each in weights]).mean(0)
        assert torch.equal(averaged[name], exact.float())
    save_model(tmp_path / "half", network(1), (), dtype=torch.bfloat16)
    save_model(tmp_path / "full", network(2), ())
    mixed = average_weights([tmp_path / "half", tmp_path / "full"])
    assert mixed["decoder.norm.weight"].dtype == torch.float32
    assert equal(
        average_weights([tmp_path / "full"]), {name: t.detach() for name, t in named_tensors(network(2)).items()}
    )


def test_different_models_cannot_be_averaged(tmp_path: Path) -> None:
    config = network().config
    for name, change in (("a", {}), ("b", {"ff_dim": 13}), ("c", {"decoder_layers": 1})):
        save_model(tmp_path / name, network(config=config.model_copy(update=change)), ())
    with pytest.raises(UserError, match=r"b and .*a belong to different models: .* differs in shape"):
        average_weights([tmp_path / "a", tmp_path / "b"])
    with pytest.raises(UserError, match=r"c and .*a belong to different models: only one has decoder\.layers\.1"):
        average_weights([tmp_path / "a", tmp_path / "c"])
    with (tmp_path / "a" / "model.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(UserError, match="is damaged"):
        average_weights([tmp_path / "a"])
    with pytest.raises(ValueError, match="give one folder or more"):
        average_weights([])
