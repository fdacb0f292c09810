"""Model folders: bits come back, ties stay, wrong contents are named, nothing of others is lost."""

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file, save_file

from clearhead.checkpoint import Loaded, disk, folder, load_model, save_model
from clearhead.checkpoint.tensors import tensors_of
from clearhead.config import ModelConfig, preset, preset_names
from clearhead.errors import UserError
from clearhead.model import build
from clearhead.text import Tokenizer
from tests.checkpoint.small import TEXTS, contents, equal, network, tokenizer
from tests.quantization import quantize_module
from tests.strategies import configs, logits, network_of, tokens

TINY = [name for name in preset_names() if name.startswith("tiny")]


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return tokenizer()


@pytest.fixture
def model(tmp_path: Path, words: Tokenizer) -> Path:
    save_model(
        tmp_path / "model", network(), words, {"task": "language", "labels": ["bad", "good"]}, card="# A model\n"
    )
    return tmp_path / "model"


@pytest.mark.parametrize("name", TINY)
def test_every_tiny_preset_comes_back_to_the_bit(name: str, tmp_path: Path, words: Tokenizer) -> None:
    made = build(preset(name))
    save_model(tmp_path / name, made, words)
    loaded = load_model(tmp_path / name)
    assert loaded.config == made.config
    assert not loaded.network.training
    assert equal(loaded.network.state_dict(), made.state_dict())
    assert len(list(loaded.network.parameters())) == len(list(made.parameters())), "ties are kept"


@given(config=configs())
@settings(max_examples=25)
def test_any_model_gives_the_same_scores_after_saving(config: ModelConfig, tmp_path_factory: Any) -> None:
    made = network_of(config)
    place = tmp_path_factory.mktemp("any") / "model"
    save_model(place, made, ())
    loaded = load_model(place)
    ids = tokens(2, 7)
    assert loaded.config == config
    assert loaded.tokenizers == ()
    assert equal(loaded.network.state_dict(), made.state_dict())
    torch.testing.assert_close(logits(loaded.network, ids), logits(made, ids), rtol=1e-12, atol=1e-12)


def test_what_was_saved_beside_the_weights_comes_back(model: Path, words: Tokenizer) -> None:
    loaded = load_model(model)
    assert loaded.extra == {"task": "language", "labels": ["bad", "good"]}
    assert [one.encode_batch(TEXTS) for one in loaded.tokenizers] == [words.encode_batch(TEXTS)]
    assert (model / "README.md").read_text() == "# A model\n"
    names = ["README.md", "config.json", "manifest.json", "model.safetensors", "tokenizer.json"]
    assert sorted(contents(model)) == names
    assert all(path.stat().st_mode & stat.S_IRGRP for path in model.iterdir()), "others may read it, as the umask says"


def test_source_and_target_keep_their_own_tokenizers(tmp_path: Path) -> None:
    config = preset(
        "tiny-translator", ["tie=none", "source_vocab_size=300", "target_vocab_size=290", "vocab_size=null"]
    )
    source, target = tokenizer(300), tokenizer(270)
    save_model(tmp_path / "model", build(config), (source, target))
    assert (tmp_path / "model" / "tokenizer.target.json").exists()
    sizes = [len(one) for one in load_model(tmp_path / "model").tokenizers]
    assert sizes == [len(source), len(target)]
    with pytest.raises(UserError, match=rf"tokenizer has {len(source)} tokens, but the model only 290"):
        save_model(tmp_path / "other", build(config), (source, source))


def test_a_tied_matrix_is_stored_once(model: Path) -> None:
    stored = load_file(model / "model.safetensors")
    assert "decoder.embedding.tokens.weight" in stored
    assert "heads.lm_head.proj.weight" not in stored
    loaded = load_model(model).network
    assert loaded.heads.lm_head is not None
    assert loaded.heads.lm_head.proj.weight is loaded.decoder.embedding.tokens.weight


def test_a_loaded_model_can_be_trained_and_saved_again_without_touching_its_file(model: Path, words: Tokenizer) -> None:
    before = contents(model)
    loaded = load_model(model)
    with torch.no_grad():
        for parameter in loaded.network.parameters():
            assert parameter.requires_grad
            parameter.add_(1)
    assert contents(model) == before
    save_model(model, loaded.network, words)
    assert equal(load_model(model).network.state_dict(), loaded.network.state_dict())


def test_large_weights_are_sharded_as_others_expect(
    tmp_path: Path, words: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "SHARD_BYTES", 1500)
    made = network()
    save_model(tmp_path / "model", made, words)
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors_of(made).values())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert files == [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)]
    for file in files:
        stored = load_file(tmp_path / "model" / file)
        assert stored.keys() == {name for name, where in index["weight_map"].items() if where == file}
        assert len(stored) == 1 or sum(t.nbytes for t in stored.values()) <= 1500
    assert equal(load_model(tmp_path / "model").network.state_dict(), made.state_dict())
    monkeypatch.setattr(folder, "SHARD_BYTES", 1 << 30)
    save_model(tmp_path / "model", network(1), words)
    assert not list((tmp_path / "model").glob("model-*")), "old shards go with the old model"
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"model\.safetensors is missing"):
        load_model(tmp_path / "model", verify=False)


def test_bf16_is_stored_and_given_on_request(tmp_path: Path, words: Tokenizer) -> None:
    made = network()
    save_model(tmp_path / "half", made, words, dtype=torch.bfloat16)
    save_model(tmp_path / "full", made, words)
    half, full = tmp_path / "half" / "model.safetensors", tmp_path / "full" / "model.safetensors"
    assert half.stat().st_size < 0.7 * full.stat().st_size
    rounded = made.to(torch.bfloat16).state_dict()
    assert equal(load_model(tmp_path / "half").network.state_dict(), rounded)
    assert equal(load_model(tmp_path / "full", dtype=torch.bfloat16).network.state_dict(), rounded)
    assert (
        load_model(tmp_path / "half", dtype=torch.float32).network.decoder.embedding.tokens.weight.dtype
        == torch.float32
    )


def test_weights_are_mapped_not_copied(tmp_path: Path, words: Tokenizer) -> None:
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("only Linux shows what is mapped")
    save_model(tmp_path / "model", network(), words)
    loaded = load_model(tmp_path / "model")
    assert str(tmp_path / "model" / "model.safetensors") in maps.read_text()
    del loaded
    assert str(tmp_path / "model" / "model.safetensors") not in maps.read_text()


def _change(model: Path, change: Any) -> None:
    """Weights that are whole files, but not this model's."""
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, model / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("decoder.norm.weight"), "decoder.norm.weight is missing; these weights are of another model"),
        (lambda t: t.clear(), "and 32 more are missing"),
        (lambda t: t.update(extra=torch.zeros(1)), "extra is not in the model"),
        (lambda t: t.update({"decoder.norm.weight": torch.zeros(9)}), "decoder.norm.weight is 9, but 8 in the model"),
        (lambda t: t.update({"decoder.norm.weight": torch.zeros(())}), "is a single number, but 8"),
        (lambda t: t.update({"decoder.norm.weight": torch.zeros(8).int()}), "holds torch.int32, but torch.float32"),
    ],
)
def test_wrong_tensors_are_named_in_one_line(model: Path, change: Any, says: str) -> None:
    _change(model, change)
    with pytest.raises(UserError, match=says) as caught:
        load_model(model, verify=False)
    assert "\n" not in str(caught.value)
    assert "model.safetensors" in str(caught.value)


def test_what_is_no_model_folder_is_named(tmp_path: Path, model: Path) -> None:
    with pytest.raises(UserError, match="nowhere is not there; give a model folder"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"config\.json is a file; give a model folder"):
        load_model(model / "config.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty is no model folder \(config.json is missing\)"):
        load_model(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "gpt2"}')
    for verify in (True, False):
        with pytest.raises(UserError, match="not of Clearhead's format; turn a foreign model with `clearhead import`"):
            load_model(tmp_path / "empty", verify=verify)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("version", 2, "version 2, but this Clearhead reads 1; update it"),
        (
            "model",
            {"family": "decoder", "withd": 8},
            r"config\.json: model: withd: unknown setting; did you mean width",
        ),
        ("model", None, r"config\.json: model: expected settings"),
    ],
)
def test_a_config_that_cannot_be_read_is_named(model: Path, key: str, value: Any, says: str) -> None:
    data = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(data | {key: value}))
    with pytest.raises(UserError, match=says):
        load_model(model, verify=False)


def test_an_edited_card_is_no_damage_but_an_edited_config_is(model: Path) -> None:
    (model / "README.md").write_text("# Better words\n")
    assert isinstance(load_model(model), Loaded)
    with (model / "config.json").open("a") as file:
        file.write(" ")
    with pytest.raises(UserError, match=r"config\.json is damaged \([\d,]+ bytes instead of [\d,]+\); copy or fetch"):
        load_model(model)
    load_model(model, verify=False)
    (model / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"manifest\.json is missing"):
        load_model(model)


def test_a_manifest_cannot_lead_out_of_its_folder(model: Path) -> None:
    (model / "manifest.json").write_text(disk._rendered({"../x": {"size": 1, "sha256": "0"}}))
    with pytest.raises(UserError, match=r"manifest\.json is damaged"):
        load_model(model)
    (model / "manifest.json").write_text(disk._rendered({}))
    with pytest.raises(UserError, match=r"manifest\.json does not list config\.json"):
        load_model(model)


def test_a_folder_that_is_no_model_is_never_replaced(tmp_path: Path, words: Tokenizer) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="home holds something that is no model"):
        save_model(tmp_path / "home", network(), words)
    with pytest.raises(UserError, match=r"thesis\.txt is a file; give a folder"):
        save_model(tmp_path / "home" / "thesis.txt", network(), words)
    assert contents(tmp_path) == {"home/thesis.txt": b"years of work"}


def test_what_others_put_beside_the_model_stays(model: Path, words: Tokenizer) -> None:
    (model / "notes.txt").write_text("the good one")
    (model / "scores.json").write_text("{}")
    (model / "plots").mkdir()
    (model / "plots" / "loss.svg").write_text("<svg/>")
    save_model(model, network(1), words)
    assert (model / "notes.txt").read_text() == "the good one"
    assert {"scores.json", "plots/loss.svg", "README.md"} <= contents(model).keys()
    assert equal(load_model(model).network.state_dict(), network(1).state_dict())
    assert [path.name for path in model.parent.iterdir()] == ["model"]


def test_a_link_to_a_model_folder_stays_a_link(model: Path, words: Tokenizer) -> None:
    link = model.parent / "link"
    link.symlink_to(model, target_is_directory=True)
    save_model(link, network(1), words)
    assert link.is_symlink()
    assert equal(load_model(model).network.state_dict(), network(1).state_dict())


def test_a_network_that_its_config_does_not_describe_is_refused(tmp_path: Path, words: Tokenizer) -> None:
    with pytest.raises(ValueError, match="a model folder holds what its config describes"):
        save_model(tmp_path / "small", quantize_module(network()), words)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"extra: version is config\.json's own"):
        save_model(tmp_path / "small", network(), words, {"version": 3})
    assert not list(tmp_path.iterdir())


def test_a_reader_never_mixes_two_models(model: Path, words: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is replaced after the checksums were read and before the weights are."""
    real, saves = folder.read_tensors, iter([1])

    def replaced_meanwhile(*arguments: Any) -> Any:
        for seed in saves:
            save_model(model, network(seed), words, {"seed": seed})
        return real(*arguments)

    monkeypatch.setattr(folder, "read_tensors", replaced_meanwhile)
    loaded = load_model(model)
    assert loaded.extra == {"seed": 1}
    assert equal(loaded.network.state_dict(), network(1).state_dict())


def test_the_temporary_folder_of_a_living_process_is_left_alone(model: Path, words: Tokenizer) -> None:
    mine, theirs, dead = (model.with_name(f".model.tmp-{pid}") for pid in (os.getpid(), os.getppid(), 2**22 + 1))
    for path in (mine, theirs, dead):
        path.mkdir()
    save_model(model, network(1), words)
    assert [path.exists() for path in (mine, theirs, dead)] == [False, True, False]


@pytest.mark.parametrize("name", TINY)
def test_a_model_stored_in_bytes_comes_back_but_for_rounding(name: str, tmp_path: Path, words: Tokenizer) -> None:
    made = build(preset(name))
    save_model(tmp_path / "wide", made, words)
    save_model(tmp_path / "small", made.bfloat16(), words, dtype=torch.int8)
    made = made.float()  # from here on what bf16 left of it
    sizes = [(tmp_path / each / "model.safetensors").stat().st_size for each in ("wide", "small")]
    assert sizes[1] < 0.3 * sizes[0]
    found, expected = (tensors_of(each) for each in (load_model(tmp_path / "small").network, made))
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype
        step = tensor.abs().amax(-1, keepdim=True) / 127 if tensor.dim() == 2 else torch.zeros(())
        assert ((found[key] - tensor).abs() <= step / 2 + 1e-7).all(), key


def test_bytes_without_their_scales_are_named(tmp_path: Path, words: Tokenizer) -> None:
    save_model(tmp_path / "model", network(), words, dtype=torch.int8)
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    lost = next(name for name in tensors if name.endswith(".scale"))
    del tensors[lost]
    save_file(tensors, file)
    with pytest.raises(UserError, match=re.escape(f"its scales {lost} are missing")):
        load_model(tmp_path / "model", verify=False)
