"""Flipped, truncated and extended files: every damage is detected and the file named."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.checkpoint import gather_state, load_model, model_folder, newest_checkpoint, save_model, write_checkpoint
from clearhead.errors import UserError
from tests.checkpoint.small_models import network, tokenizer, trained


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> Path:
    """A sharded model folder, with every kind of file."""
    root = tmp_path_factory.mktemp("damage") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_folder, "SHARD_BYTES", 4000)
        save_model(root, network(), tokenizer(), {"task": "language"})
    return root


@pytest.fixture(scope="module")
def run(tmp_path_factory: Any) -> Path:
    root = tmp_path_factory.mktemp("damage")
    for number in (1, 2):
        write_checkpoint(root, number, *gather_state(*trained(number)), {"position": number}, keep=2)
    return root


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def assert_model_is_refused(root: Path, file: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_model(root)
    assert file.name in str(caught.value) or file.name == "manifest.json"
    assert "\n" not in str(caught.value)


def assert_checkpoint_is_refused(root: Path, file: Path) -> None:
    state, errors = newest_checkpoint(root)
    assert state is not None
    assert state.step == 1
    assert len(errors) == 1
    assert file.name in errors[0] or file.name == "manifest.json"


def check_damaged(file: Path, data: bytes, check: Any, root: Path) -> None:
    original = file.read_bytes()
    try:
        file.write_bytes(data)
        check(root, file)
    finally:
        file.write_bytes(original)


def test_a_flipped_bit_in_every_thousandth_byte_is_detected(model: Path, run: Path) -> None:
    newest = run / "checkpoints" / "step-00000002"
    for root, check, folder in ((model, assert_model_is_refused, model), (run, assert_checkpoint_is_refused, newest)):
        for file in files(folder):
            data = file.read_bytes()
            for index in {*range(0, len(data), 1000), len(data) - 1}:
                flipped = bytearray(data)
                flipped[index] ^= 1 << index % 8
                check_damaged(file, bytes(flipped), check, root)
    load_model(model)
    assert newest_checkpoint(run)[1] == []


@given(data=st.data())
@settings(max_examples=150)
def test_any_damage_to_a_model_folder_is_detected(model: Path, data: st.DataObject) -> None:
    check_random_damage(data, model, assert_model_is_refused, model)


@given(data=st.data())
@settings(max_examples=150)
def test_any_damage_to_the_newest_checkpoint_is_detected(run: Path, data: st.DataObject) -> None:
    check_random_damage(data, run / "checkpoints" / "step-00000002", assert_checkpoint_is_refused, run)


def check_random_damage(data: st.DataObject, folder: Path, check: Any, root: Path) -> None:
    file = data.draw(st.sampled_from(files(folder)))
    original = file.read_bytes()
    damage = data.draw(st.sampled_from(["replace", "cut", "append", "zero", "empty", "insert"]))
    position = data.draw(st.integers(0, len(original) - 1))
    damaged_data = {
        "replace": original[:position] + bytes([data.draw(st.integers(0, 255))]) + original[position + 1 :],
        "cut": original[:position],
        "append": original + data.draw(st.binary(min_size=1, max_size=9)),
        "zero": original[:position] + bytes(len(original) - position),  # an unsynced file after a power failure
        "empty": b"",
        "insert": original[:position] + b" " + original[position:],
    }[damage]
    if damaged_data != original:
        check_damaged(file, damaged_data, check, root)


def test_every_missing_file_is_named(model: Path, tmp_path: Path) -> None:
    for file in files(model):
        copy = tmp_path / file.name
        shutil.copytree(model, copy)
        (copy / file.name).unlink()
        with pytest.raises(UserError, match=rf"{file.name} is missing; copy or fetch the model folder again"):
            load_model(copy)


def test_a_truncated_file_is_detected_without_checksums(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    file = next(copy.glob("model-00002*"))
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(UserError, match=rf"{file.name} cannot be read as safetensors"):
        load_model(copy, verify=False)
    file.unlink()
    with pytest.raises(UserError, match=r"index\.json names files that are missing"):
        load_model(copy, verify=False)
