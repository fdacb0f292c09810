"""The checkpoints of a run are models of the page, in the order of their steps."""

from pathlib import Path

import torch

from clearhead.checkpoint.gather import gather_weights
from clearhead.checkpoint.training_checkpoint import write_checkpoint
from clearhead.interpret.trace import own_copy
from clearhead.serve.inspect import checkpoints
from tests.explore.models import small


def write_run(run: Path, steps: list[int]) -> None:
    network = own_copy(small("gpt").network)
    for step in steps:
        weights = {name: tensor * (step / 100) for name, tensor in gather_weights(network).items()}
        write_checkpoint(run, step, weights, {"m": torch.zeros(1)}, {}, keep=100)


def test_checkpoints_have_the_weights_of_their_steps(tmp_path: Path) -> None:
    write_run(tmp_path, [100, 50])
    found = checkpoints.checkpoint_models(tmp_path, small("gpt"), "run")
    assert list(found) == ["run step-50", "run step-100"]
    own = small("gpt").network.decoder.layers[0].attention.query.weight
    torch.testing.assert_close(found["run step-50"].network.decoder.layers[0].attention.query.weight, own / 2)
    ids = torch.tensor([small("gpt").prompt_ids("a man")])
    torch.testing.assert_close(found["run step-100"].logits(ids), small("gpt").logits(ids))


def test_of_many_checkpoints_some_are_shown(tmp_path: Path) -> None:
    write_run(tmp_path, list(range(1, 41)))
    found = checkpoints.checkpoint_models(tmp_path, small("gpt"), "run")
    assert len(found) == checkpoints.MAX_CHECKPOINTS
    names = list(found)
    assert (names[0], names[-1]) == ("run step-1", "run step-40")


def test_a_model_folder_has_none(tmp_path: Path) -> None:
    assert checkpoints.checkpoint_models(tmp_path, small("gpt"), "run") == {}
