"""Flipped, cut and lengthened files: every one is found, named, and never read as if it were whole."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.checkpoint import folder, gather, load_model, newest_state, save_model, save_state
from clearhead.errors import UserError
from tests.checkpoint.small import network, tokenizer, trained


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> Path:
    """A sharded model folder: every kind of file that there is."""
    place = tmp_path_factory.mktemp("damage") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder, "SHARD_BYTES", 4000)
        save_model(place, network(), tokenizer(), {"task": "language"})
    return place


@pytest.fixture(scope="module")
def run(tmp_path_factory: Any) -> Path:
    place = tmp_path_factory.mktemp("damage")
    for number in (1, 2):
        save_state(place, number, *gather(*trained(number)), {"position": number}, keep=2)
    return place


def files(place: Path) -> list[Path]:
    return sorted(path for path in place.rglob("*") if path.is_file())


def check_model(place: Path, file: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_model(place)
    assert file.name in str(caught.value) or file.name == "manifest.json"
    assert "\n" not in str(caught.value)


def check_run(place: Path, file: Path) -> None:
    state, refused = newest_state(place)
    assert state is not None
    assert state.step == 1
    assert len(refused) == 1
    assert file.name in refused[0] or file.name == "manifest.json"


def damaged(file: Path, data: bytes, check: Any, place: Path) -> None:
    whole = file.read_bytes()
    try:
        file.write_bytes(data)
        check(place, file)
    finally:
        file.write_bytes(whole)


def test_every_thousandth_byte_of_every_file_is_guarded(model: Path, run: Path) -> None:
    newest = run / "checkpoints" / "step-00000002"
    for place, check, guarded in ((model, check_model, model), (run, check_run, newest)):
        for file in files(guarded):
            data = file.read_bytes()
            for index in {*range(0, len(data), 1000), len(data) - 1}:
                flipped = bytearray(data)
                flipped[index] ^= 1 << index % 8
                damaged(file, bytes(flipped), check, place)
    load_model(model)
    assert newest_state(run)[1] == []


@given(data=st.data())
@settings(max_examples=150)
def test_any_damage_to_a_model_folder_is_found(model: Path, data: st.DataObject) -> None:
    _hurt(data, model, check_model, model)


@given(data=st.data())
@settings(max_examples=150)
def test_any_damage_to_the_newest_state_is_found_and_the_one_before_taken(run: Path, data: st.DataObject) -> None:
    _hurt(data, run / "checkpoints" / "step-00000002", check_run, run)


def _hurt(data: st.DataObject, guarded: Path, check: Any, place: Path) -> None:
    file = data.draw(st.sampled_from(files(guarded)))
    whole = file.read_bytes()
    kind = data.draw(st.sampled_from(["replace", "cut", "append", "zero", "empty", "insert"]))
    at = data.draw(st.integers(0, len(whole) - 1))
    hurt = {
        "replace": whole[:at] + bytes([data.draw(st.integers(0, 255))]) + whole[at + 1 :],
        "cut": whole[:at],
        "append": whole + data.draw(st.binary(min_size=1, max_size=9)),
        "zero": whole[:at] + bytes(len(whole) - at),  # what a power cut leaves of a file that was not synced
        "empty": b"",
        "insert": whole[:at] + b" " + whole[at:],
    }[kind]
    if hurt != whole:
        damaged(file, hurt, check, place)


def test_every_missing_file_is_found(model: Path, tmp_path: Path) -> None:
    for file in files(model):
        copy = tmp_path / file.name
        shutil.copytree(model, copy)
        (copy / file.name).unlink()
        with pytest.raises(UserError, match=rf"{file.name} is missing; copy or fetch the model folder again"):
            load_model(copy)


def test_without_checksums_a_cut_file_is_still_found(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    file = next(copy.glob("model-00002*"))
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(UserError, match=rf"{file.name} cannot be read as safetensors"):
        load_model(copy, verify=False)
    file.unlink()
    with pytest.raises(UserError, match=r"index\.json names files that are missing"):
        load_model(copy, verify=False)
