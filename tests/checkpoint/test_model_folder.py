"""Model folders: exact round trips, tied tensors, clear errors, and files of users are kept."""

import json
import os
import re
import resource
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file, save_file

from clearhead.checkpoint import LoadedModel, disk, load_model, model_folder, model_folder_info, save_model, tensors
from clearhead.checkpoint.tensors import named_tensors
from clearhead.config import ModelConfig, preset, preset_names
from clearhead.errors import UserError
from clearhead.model import build
from clearhead.text import Tokenizer
from tests.checkpoint.small_models import TEXTS, contents, equal, network, tokenizer
from tests.quantization import quantize_module
from tests.strategies import configs, logits, network_of, tokens

TINY = [name for name in preset_names() if name.startswith("tiny")]


@pytest.fixture(scope="module")
def text_tokenizer() -> Tokenizer:
    return tokenizer()


@pytest.fixture
def model(tmp_path: Path, text_tokenizer: Tokenizer) -> Path:
    save_model(
        tmp_path / "model",
        network(),
        text_tokenizer,
        {"task": "language", "labels": ["bad", "good"]},
        card="# A model\n",
    )
    return tmp_path / "model"


@pytest.mark.parametrize("name", TINY)
def test_every_tiny_preset_is_restored_bit_exactly(name: str, tmp_path: Path, text_tokenizer: Tokenizer) -> None:
    original = build(preset(name))
    save_model(tmp_path / name, original, text_tokenizer)
    loaded = load_model(tmp_path / name)
    assert loaded.config == original.config
    assert not loaded.network.training
    assert equal(loaded.network.state_dict(), original.state_dict())
    assert len(list(loaded.network.parameters())) == len(list(original.parameters())), "tied weights stay tied"


@given(config=configs())
@settings(max_examples=25)
def test_any_model_gives_the_same_logits_after_saving(config: ModelConfig, tmp_path_factory: Any) -> None:
    original = network_of(config)
    folder = tmp_path_factory.mktemp("any") / "model"
    save_model(folder, original, ())
    loaded = load_model(folder)
    ids = tokens(2, 7)
    assert loaded.config == config
    assert loaded.tokenizers == ()
    assert equal(loaded.network.state_dict(), original.state_dict())
    torch.testing.assert_close(logits(loaded.network, ids), logits(original, ids), rtol=1e-12, atol=1e-12)


def test_tokenizer_extra_and_card_are_restored(model: Path, text_tokenizer: Tokenizer) -> None:
    loaded = load_model(model)
    assert loaded.extra == {"task": "language", "labels": ["bad", "good"]}
    assert [each.encode_batch(TEXTS) for each in loaded.tokenizers] == [text_tokenizer.encode_batch(TEXTS)]
    assert (model / "README.md").read_text() == "# A model\n"
    names = ["README.md", "config.json", "manifest.json", "model.safetensors", "tokenizer.json"]
    assert sorted(contents(model)) == names
    assert all(path.stat().st_mode & stat.S_IRGRP for path in model.iterdir()), "the umask sets the permissions"


def test_source_and_target_keep_their_own_tokenizers(tmp_path: Path) -> None:
    config = preset(
        "tiny-translator", ["tie=none", "source_vocab_size=300", "target_vocab_size=290", "vocab_size=null"]
    )
    source, target = tokenizer(300), tokenizer(270)
    save_model(tmp_path / "model", build(config), (source, target))
    assert (tmp_path / "model" / "tokenizer.target.json").exists()
    sizes = [len(each) for each in load_model(tmp_path / "model").tokenizers]
    assert sizes == [len(source), len(target)]
    with pytest.raises(UserError, match=rf"tokenizer has {len(source)} tokens, but the model only 290"):
        save_model(tmp_path / "other", build(config), (source, source))


def test_a_tied_weight_is_stored_once(model: Path) -> None:
    stored = load_file(model / "model.safetensors")
    assert "decoder.embedding.tokens.weight" in stored
    assert "heads.lm_head.proj.weight" not in stored
    loaded = load_model(model).network
    assert loaded.heads.lm_head is not None
    assert loaded.heads.lm_head.proj.weight is loaded.decoder.embedding.tokens.weight


def test_changing_a_loaded_model_does_not_change_its_file(model: Path, text_tokenizer: Tokenizer) -> None:
    before = contents(model)
    loaded = load_model(model)
    with torch.no_grad():
        for parameter in loaded.network.parameters():
            assert parameter.requires_grad
            parameter.add_(1)
    assert contents(model) == before
    save_model(model, loaded.network, text_tokenizer)
    assert equal(load_model(model).network.state_dict(), loaded.network.state_dict())


def test_large_weights_are_sharded_in_hugging_face_format(
    tmp_path: Path, text_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_folder, "SHARD_BYTES", 1500)
    original = network()
    save_model(tmp_path / "model", original, text_tokenizer)
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in named_tensors(original).values())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert files == [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)]
    for file in files:
        stored = load_file(tmp_path / "model" / file)
        assert stored.keys() == {name for name, where in index["weight_map"].items() if where == file}
        assert len(stored) == 1 or sum(t.nbytes for t in stored.values()) <= 1500
    assert equal(load_model(tmp_path / "model").network.state_dict(), original.state_dict())
    monkeypatch.setattr(model_folder, "SHARD_BYTES", 1 << 30)
    save_model(tmp_path / "model", network(1), text_tokenizer)
    assert not list((tmp_path / "model").glob("model-*")), "old shards are deleted with the old model"
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"model\.safetensors is missing"):
        load_model(tmp_path / "model", verify=False)


def test_weights_are_stored_and_loaded_in_bf16(tmp_path: Path, text_tokenizer: Tokenizer) -> None:
    original = network()
    save_model(tmp_path / "bf16", original, text_tokenizer, dtype=torch.bfloat16)
    save_model(tmp_path / "fp32", original, text_tokenizer)
    bf16, fp32 = tmp_path / "bf16" / "model.safetensors", tmp_path / "fp32" / "model.safetensors"
    assert bf16.stat().st_size < 0.7 * fp32.stat().st_size
    expected_bf16 = original.to(torch.bfloat16).state_dict()
    assert equal(load_model(tmp_path / "bf16").network.state_dict(), expected_bf16)
    assert equal(load_model(tmp_path / "fp32", dtype=torch.bfloat16).network.state_dict(), expected_bf16)
    assert (
        load_model(tmp_path / "bf16", dtype=torch.float32).network.decoder.embedding.tokens.weight.dtype
        == torch.float32
    )


def test_large_weights_are_memory_mapped_and_small_ones_copied(
    tmp_path: Path, text_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps, file = Path("/proc/self/maps"), tmp_path / "model" / "model.safetensors"
    if not maps.exists():
        pytest.skip("needs /proc/self/maps")
    save_model(tmp_path / "model", network(), text_tokenizer)
    loaded = load_model(tmp_path / "model")
    assert str(file) not in maps.read_text()
    os.truncate(file, 10)
    assert equal(loaded.network.state_dict(), network().state_dict()), "truncation in place changes nothing"
    save_model(tmp_path / "model", network(), text_tokenizer)
    monkeypatch.setattr(tensors, "COPIED_BYTES", file.stat().st_size - 1)
    loaded = load_model(tmp_path / "model")
    assert str(file) in maps.read_text()
    del loaded
    assert str(file) not in maps.read_text()


def test_tensors_of_small_and_large_files_are_in_the_same_order(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [list(tensors.read_tensors(model / "model.safetensors")) for _ in range(5)]
    monkeypatch.setattr(tensors, "COPIED_BYTES", 0)
    assert names == [list(tensors.read_tensors(model / "model.safetensors"))] * 5, "otherwise ranks mix them up"


def change_weights(model: Path, change: Any) -> None:
    """Replace the weights by a valid file that does not fit the model."""
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, model / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("decoder.norm.weight"), "decoder.norm.weight is missing; these weights belong to"),
        (lambda t: t.clear(), "0 tensors, fewer than the model has layers"),
        (lambda t: [t.pop(name) for name in list(t)[9:]], "and 23 more are missing"),
        (lambda t: t.update(extra=torch.zeros(1)), "extra is not in the model"),
        (lambda t: t.update({"decoder.norm.weight": torch.zeros(9)}), "decoder.norm.weight is 9, but 8 in the model"),
        (lambda t: t.update({"decoder.norm.weight": torch.zeros(())}), "is a scalar, but 8"),
        (lambda t: t.update({"decoder.norm.weight": torch.zeros(8).int()}), "is torch.int32, but torch.float32"),
        (
            lambda t: t.update({"decoder.norm.weight": torch.zeros(8).to(torch.float8_e4m3fn)}),
            "weights of dtype torch.float8_e4m3fn are not supported",
        ),
        (lambda t: t.update({"decoder.norm.weight": torch.zeros(8, dtype=torch.int8)}), "is int8, but not a matrix"),
    ],
)
def test_tensors_that_do_not_fit_are_named_in_one_line(model: Path, change: Any, message: str) -> None:
    change_weights(model, change)
    with pytest.raises(UserError, match=message) as caught:
        load_model(model, verify=False)
    assert "\n" not in str(caught.value)
    assert "model.safetensors" in str(caught.value)


def test_other_folders_and_files_are_refused(tmp_path: Path, model: Path) -> None:
    with pytest.raises(UserError, match="nowhere does not exist; give a model folder"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"config\.json is a file; give a model folder"):
        load_model(model / "config.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty is not a model folder \(config.json is missing\)"):
        load_model(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "gpt2"}')
    for verify in (True, False):
        with pytest.raises(UserError, match="not a Clearhead model; convert other formats with `clearhead import`"):
            load_model(tmp_path / "empty", verify=verify)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model", {"family": "decoder", "dimm": 8}, r"config\.json: model: dimm: unknown setting; did you mean dim"),
        ("model", None, r"config\.json: model: expected settings"),
    ],
)
def test_wrong_settings_are_named(model: Path, key: str, value: Any, message: str) -> None:
    data = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(data | {key: value}))
    with pytest.raises(UserError, match=message):
        load_model(model, verify=False)


def test_an_edited_card_is_accepted_but_an_edited_config_is_damage(model: Path) -> None:
    (model / "README.md").write_text("# A better text\n")
    assert isinstance(load_model(model), LoadedModel)
    with (model / "config.json").open("a") as file:
        file.write(" ")
    with pytest.raises(UserError, match=r"config\.json is damaged \([\d,]+ bytes instead of [\d,]+\); copy or fetch"):
        load_model(model)
    load_model(model, verify=False)
    (model / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"manifest\.json is missing"):
        load_model(model)


def test_a_manifest_with_paths_outside_the_folder_is_refused(model: Path) -> None:
    for name in ("../x", "..", ".", "", "a/b", "a\0b"):
        (model / "manifest.json").write_text(disk._to_json({name: {"size": 1, "sha256": "0"}}))
        with pytest.raises(UserError, match=r"manifest\.json is damaged"):
            load_model(model)
    (model / "manifest.json").write_text(disk._to_json({}))
    with pytest.raises(UserError, match=r"manifest\.json does not list config\.json"):
        load_model(model)


def test_a_folder_with_other_files_is_never_replaced(tmp_path: Path, text_tokenizer: Tokenizer) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="home contains files that are not a model"):
        save_model(tmp_path / "home", network(), text_tokenizer)
    with pytest.raises(UserError, match=r"thesis\.txt is a file; give a folder"):
        save_model(tmp_path / "home" / "thesis.txt", network(), text_tokenizer)
    assert contents(tmp_path) == {"home/thesis.txt": b"years of work"}


def test_files_of_users_are_kept_when_a_model_is_replaced(model: Path, text_tokenizer: Tokenizer) -> None:
    (model / "notes.txt").write_text("the good one")
    (model / "scores.json").write_text("{}")
    (model / "plots").mkdir()
    (model / "plots" / "loss.svg").write_text("<svg/>")
    save_model(model, network(1), text_tokenizer)
    assert (model / "notes.txt").read_text() == "the good one"
    assert {"scores.json", "plots/loss.svg", "README.md"} <= contents(model).keys()
    assert equal(load_model(model).network.state_dict(), network(1).state_dict())
    assert [path.name for path in model.parent.iterdir()] == ["model"]


def test_a_link_to_a_model_folder_stays_a_link(model: Path, text_tokenizer: Tokenizer) -> None:
    link = model.parent / "link"
    link.symlink_to(model, target_is_directory=True)
    save_model(link, network(1), text_tokenizer)
    assert link.is_symlink()
    assert equal(load_model(model).network.state_dict(), network(1).state_dict())


def test_a_network_that_does_not_match_its_config_is_refused(tmp_path: Path, text_tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="the network does not match its config"):
        save_model(tmp_path / "int8", quantize_module(network()), text_tokenizer)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"extra: version is a key of config\.json itself"):
        save_model(tmp_path / "int8", network(), text_tokenizer, {"version": 3})
    assert not list(tmp_path.iterdir())


def test_a_replaced_folder_is_read_again(
    model: Path, text_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is replaced between the checksums and the weights."""
    read_tensors, saves = model_folder.read_tensors, iter([1])

    def replace_then_read(*arguments: Any) -> Any:
        for seed in saves:
            save_model(model, network(seed), text_tokenizer, {"seed": seed})
        return read_tensors(*arguments)

    monkeypatch.setattr(model_folder, "read_tensors", replace_then_read)
    loaded = load_model(model)
    assert loaded.extra == {"seed": 1}
    assert equal(loaded.network.state_dict(), network(1).state_dict())


def test_a_folder_that_moves_while_it_is_read_is_read_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same folder is .model.old after the first rename of its replacement."""
    verify, moves = disk.verify, iter([1])

    def move_then_verify(folder: Path) -> set[str]:
        for _ in moves:
            model.rename(model.with_name(".model.old"))
        return verify(folder)

    monkeypatch.setattr(disk, "verify", move_then_verify)
    assert load_model(model).extra["task"] == "language"


def test_temporary_folders_of_running_writers_are_kept(model: Path, text_tokenizer: Tokenizer) -> None:
    dead, earlier, unrelated = (model.with_name(f".model.tmp-{name}") for name in ("0123abcd", "4711", "backup"))
    for path in (dead, earlier, unrelated):
        path.mkdir()
    with disk.atomic_folder(model) as running:
        save_model(model, network(1), text_tokenizer)
        assert [path.exists() for path in (dead, earlier, unrelated, running)] == [False, False, True, True]
        (running / "config.json").write_text("{}")
    assert json.loads((model / "config.json").read_text()) == {}, "the last to finish wins"
    assert {path.name for path in model.parent.iterdir()} == {"model", unrelated.name}


def test_threads_that_save_one_folder_leave_one_complete_model(tmp_path: Path, text_tokenizer: Tokenizer) -> None:
    def save(seed: int) -> None:
        for _ in range(5):
            save_model(tmp_path / "model", network(), text_tokenizer, {"seed": seed})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(save, range(4)))
    assert load_model(tmp_path / "model").extra["seed"] in range(4)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("name", ["config.json", "manifest.json", "model.safetensors", "tokenizer.json", "README.md"])
@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
def test_pipes_sockets_and_devices_in_a_folder_are_refused_at_once(model: Path, name: str, kind: str) -> None:
    (model / name).unlink()
    if kind == "pipe":
        os.mkfifo(model / name)
    elif kind == "device":
        (model / name).symlink_to("/dev/zero")
    else:
        server = socket.socket(socket.AF_UNIX)
        server.bind(os.path.relpath(model / name))  # the path of a socket has at most 108 bytes
    readers: list[Any] = [load_model, partial(load_model, verify=False), model_folder_info]
    for read in readers if name != "README.md" else [model_folder_info]:
        if name == "manifest.json" and read is not load_model:
            continue
        with pytest.raises(UserError, match=f"{name} is not a regular file"):
            read(model)


@pytest.mark.parametrize("name", TINY)
def test_int8_storage_is_exact_up_to_rounding(name: str, tmp_path: Path, text_tokenizer: Tokenizer) -> None:
    original = build(preset(name))
    save_model(tmp_path / "fp32", original, text_tokenizer)
    save_model(tmp_path / "int8", original.bfloat16(), text_tokenizer, dtype=torch.int8)
    original = original.float()  # the values after rounding to bf16
    sizes = [(tmp_path / each / "model.safetensors").stat().st_size for each in ("fp32", "int8")]
    assert sizes[1] < 0.3 * sizes[0]
    restored, expected = (named_tensors(each) for each in (load_model(tmp_path / "int8").network, original))
    assert restored.keys() == expected.keys()
    for key, tensor in expected.items():
        assert restored[key].dtype == tensor.dtype
        step = tensor.abs().amax(-1, keepdim=True) / 127 if tensor.dim() == 2 else torch.zeros(())
        assert ((restored[key] - tensor).abs() <= step / 2 + 1e-7).all(), key


def test_missing_int8_scales_are_named(tmp_path: Path, text_tokenizer: Tokenizer) -> None:
    save_model(tmp_path / "model", network(), text_tokenizer, dtype=torch.int8)
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    lost = next(name for name in tensors if name.endswith(".scale"))
    del tensors[lost]
    save_file(tensors, file)
    with pytest.raises(UserError, match=re.escape(f"its scales {lost} are missing")):
        load_model(tmp_path / "model", verify=False)


def test_an_int8_vector_with_scales_is_refused_before_it_is_a_matrix(model: Path) -> None:
    name, size = "decoder.norm.weight", 30_000  # as a matrix, 3.6 GB
    tensors = {name: torch.zeros(size, dtype=torch.int8), f"{name}.scale": torch.ones(size)}
    change_weights(model, lambda stored: stored.update(tensors))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=r"decoder.norm.weight is int8, but not a matrix; fetch or convert"):
        load_model(model, verify=False)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_weights_of_eight_bit_floats_are_refused(model: Path, dtype: torch.dtype) -> None:
    change_weights(model, lambda stored: stored.update({name: each.to(dtype) for name, each in stored.items()}))
    with pytest.raises(UserError, match=r"weights of dtype torch.float8_\w+ are not supported; convert them to"):
        load_model(model, verify=False)


def test_weights_of_several_dtypes_become_the_widest(model: Path) -> None:
    change_weights(model, lambda stored: stored.update({"decoder.norm.weight": stored["decoder.norm.weight"].half()}))
    loaded = load_model(model, verify=False)
    assert {parameter.dtype for parameter in loaded.network.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"task": ["x"]}, r"config\.json: task: \['x'\] is not a string"),
        ({"labels": "yes"}, r"config\.json: labels: "),
        ({"labels": [["a"]]}, r"config\.json: labels\.0"),
        ({"data": "x"}, r"config\.json: data: 'x' is not a group of settings"),
        ({"begin": 5}, r"config\.json: begin: "),
        ({"eos_ids": [-1]}, r"config\.json: eos_ids\.0: -1 is too small"),
        ({"eos_ids": [1 << 70]}, r"config\.json: eos_ids\.0: "),
        ({"banned_ids": [1]}, r"config\.json: banned_ids\.0"),
        ({"pad": "x"}, r"config\.json: pad: 'x' is not a whole number"),
        ({"source_end": 1}, r"config\.json: source_end: 1 is neither true nor false"),
        ({"chat_template": {}}, r"config\.json: chat_template: "),
        ({"pooling": "max"}, r"config\.json: pooling: 'max' is not allowed; use cls or mean"),
        ({"normalized": "no"}, r"config\.json: normalized: "),
        ({"max_length": 0}, r"config\.json: max_length: 0 is too small"),
    ],
)
def test_extra_keys_of_another_type_are_named(model: Path, extra: dict[str, Any], message: str) -> None:
    path = model / "config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | extra))
    with pytest.raises(UserError, match=message) as caught:
        load_model(model, verify=False)
    assert len(str(caught.value).splitlines()) <= 2
    path.write_text(json.dumps(settings | dict.fromkeys(extra) | {"anything": extra}))
    expected = (settings.keys() | {"anything"}) - {"format", "version", "model"} - extra.keys()
    assert load_model(model, verify=False).extra.keys() == expected
