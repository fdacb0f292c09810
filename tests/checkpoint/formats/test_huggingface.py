"""Folders of Hugging Face: what transformers saves we load, what we save it loads, and nothing changes on the way."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from clearhead.checkpoint import folder as model_folder
from clearhead.checkpoint import load_model, save_model
from clearhead.checkpoint.formats import export_model, import_model, read_foreign
from clearhead.config import ModelConfig
from clearhead.config.generation import GenerationConfig
from clearhead.config.load import preset
from clearhead.errors import UserError
from clearhead.inference import generate, translate
from clearhead.model import build
from tests.checkpoint.formats.peers import DECODERS, PEERS, WORDS, ours, outputs, saved
from tests.checkpoint.small import tokenizer

every = pytest.mark.parametrize("name", PEERS)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(WORDS, (3, 17)), torch.randint(83, (3, 11))


def assert_same(network: Any, theirs: Any) -> None:
    """All that both compute, to 1e-5 in fp32."""
    ids, target = inputs()
    mine, other = ours(network, ids, target), outputs(theirs, ids, target)
    assert other
    for key, expected in other.items():
        assert expected.std() > 0.05, "so small that anything would agree"
        torch.testing.assert_close(mine[key], expected, atol=1e-5, rtol=0)


def bits(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Every tensor of a folder, bit by bit."""
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= {
            name: (tensor.dtype, tuple(tensor.shape), tensor.contiguous().view(torch.uint8).numpy().tobytes())
            for name, tensor in load_file(file).items()
        }
    return found


@every
def test_what_transformers_saved_gives_the_same_outputs(name: str, tmp_path: Path) -> None:
    theirs = saved(name, tmp_path / "theirs")
    import_model(tmp_path / "theirs", tmp_path / "ours")
    assert_same(load_model(tmp_path / "ours").network, theirs)


@every
def test_what_we_export_gives_the_same_outputs_in_transformers(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path / "theirs")
    import_model(tmp_path / "theirs", tmp_path / "ours")
    loaded = load_model(tmp_path / "ours")
    export_model(loaded, tmp_path / "back", "hf")
    kind = getattr(transformers, PEERS[name][0])
    made, report = kind.from_pretrained(tmp_path / "back", output_loading_info=True, attn_implementation="eager")
    assert not any(report.values()), report
    assert_same(loaded.network, made.eval())


@every
def test_there_and_back_not_a_bit_of_the_weights_changes(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path / "theirs")
    import_model(tmp_path / "theirs", tmp_path / "ours")
    export_model(load_model(tmp_path / "ours"), tmp_path / "back", "hf")
    import_model(tmp_path / "back", tmp_path / "again")
    assert bits(tmp_path / "theirs") == bits(tmp_path / "back")
    assert bits(tmp_path / "ours") == bits(tmp_path / "again")
    assert load_model(tmp_path / "ours").config == load_model(tmp_path / "again").config


@pytest.mark.parametrize("name", DECODERS)
def test_fifty_greedy_tokens_are_the_same(name: str, tmp_path: Path) -> None:
    theirs = saved(name, tmp_path / "theirs")
    network = read_and_build(tmp_path / "theirs")
    prompt = torch.randint(WORDS, (1, 7))
    options = {"max_new_tokens": 50, "min_new_tokens": 50, "do_sample": False, "pad_token_id": 0}
    seen = torch.ones_like(prompt)  # else they would take a 0 in the prompt for padding
    expected = theirs.generate(prompt, attention_mask=seen, **options)[0, 7:]
    found = generate(network, prompt.tolist(), GenerationConfig(max_new_tokens=50), end=[])
    assert found[0][0].ids == expected.tolist()


@pytest.mark.parametrize("name", ["marian", "marian-two"])
def test_fifty_greedy_words_of_a_translator_are_the_same(name: str, tmp_path: Path) -> None:
    theirs = saved(name, tmp_path / "theirs")
    network, padding = read_and_build(tmp_path / "theirs"), theirs.config.pad_token_id
    source = torch.randint(80, (1, 9))
    expected = theirs.generate(
        source, max_new_tokens=50, do_sample=False, num_beams=1, eos_token_id=-1, bad_words_ids=[[padding]]
    )[0, 1:]
    config = GenerationConfig(max_new_tokens=50, banned_ids=((padding,),))
    found = translate(network, source.tolist(), config, begin=padding, end=[])
    assert found[0][0].ids == expected.tolist()


def read_and_build(folder: Path) -> Any:
    found = read_foreign(folder)
    return model_folder.with_weights(found.config, found.weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_what_it_is(dtype: torch.dtype, tmp_path: Path) -> None:
    saved("llama2", tmp_path / "fp32").to(dtype).save_pretrained(tmp_path / "theirs")
    import_model(tmp_path / "theirs", tmp_path / "ours")
    export_model(load_model(tmp_path / "ours"), tmp_path / "back", "hf")
    assert {kind for kind, _, _ in bits(tmp_path / "back").values()} == {dtype}
    assert bits(tmp_path / "theirs") == bits(tmp_path / "back")


def test_sharded_folders_are_read_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = saved("llama2", tmp_path / "theirs", max_shard_size="60KB")
    assert len(list((tmp_path / "theirs").glob("model-*.safetensors"))) > 2
    import_model(tmp_path / "theirs", tmp_path / "ours")
    monkeypatch.setattr(model_folder, "SHARD_BYTES", 60_000)
    export_model(load_model(tmp_path / "ours"), tmp_path / "back", "hf")
    assert len(list((tmp_path / "back").glob("model-*.safetensors"))) > 2
    made = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert_same(load_model(tmp_path / "ours").network, theirs)
    assert_same(load_model(tmp_path / "ours").network, made.eval())


def test_older_spellings_are_read(tmp_path: Path) -> None:
    """Without prefixes, with masks among the weights, gamma and beta, and rotary settings at the root."""
    for name, change in (("gpt2", bare_gpt2), ("bert-pretraining", old_bert), ("llama3.2", old_llama)):
        theirs = saved(name, tmp_path / name)
        file, config = tmp_path / name / "model.safetensors", tmp_path / name / "config.json"
        tensors, settings = change(load_file(file), json.loads(config.read_text()))
        save_file(tensors, file)
        config.write_text(json.dumps(settings))
        assert_same(read_and_build(tmp_path / name), theirs)


def bare_gpt2(tensors: dict[str, Any], settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    found = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    found |= {f"h.{n}.attn.bias": torch.ones(1, 1, 64, 64).tril() for n in range(3)}
    return found | {"lm_head.weight": found["wte.weight"].clone()}, settings


def old_bert(tensors: dict[str, Any], settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    found = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    found["cls.predictions.decoder.bias"] = found["cls.predictions.bias"].clone()
    return found | {"bert.embeddings.position_ids": torch.arange(64)[None]}, settings


def old_llama(tensors: dict[str, Any], settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    rope = settings.pop("rope_parameters")
    theta = rope.pop("rope_theta")
    found = tensors | {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(8) for n in range(2)}
    return found, settings | {"rope_theta": theta, "rope_scaling": rope}


REFUSED = {
    "attention_bias": (True, "biases beside attention"),
    "hidden_act": ("relu", "this activation"),
    "rope_parameters": ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}, "scaling of kind 'yarn'"),
    "quantization_config": ({"bits": 4}, "quantized weights"),
    "auto_map": ({"AutoModel": "code.py"}, "code of its own"),
    "model_type": ("mamba", "known: bert"),
    "hidden_size": ("64", "is not a whole number"),
    "num_hidden_layers": (1 << 40, "too large"),
    "vocab_size": (98, "97 × 64, but 98 × 64"),
    "tie_word_embeddings": (True, "differs from what it should be tied to"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_we_cannot_do_is_refused_by_name(key: str, tmp_path: Path) -> None:
    saved("llama2", tmp_path / "theirs")
    config = tmp_path / "theirs" / "config.json"
    value, message = REFUSED[key]
    config.write_text(json.dumps(json.loads(config.read_text()) | {key: value}))
    with pytest.raises(UserError, match=message):
        import_model(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_unknown_settings_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved("llama2", tmp_path / "theirs")
    config = tmp_path / "theirs" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"flux_capacitor": 1.21, "unset": None}))
    read_foreign(tmp_path / "theirs")
    assert "flux_capacitor: not known here" in caplog.text
    assert "unset" not in caplog.text


@every
def test_nothing_that_transformers_writes_is_unknown(name: str, tmp_path: Path, caplog: Any) -> None:
    saved(name, tmp_path / "theirs")
    read_foreign(tmp_path / "theirs")
    assert "not known" not in caplog.text


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"sinusoid": "interleaved"}, "sinusoid is halves there, interleaved here"),
        ({"norm_position": "pre"}, "norm_position is post there, pre here"),
        ({"norm_eps": 1e-6}, "norm_eps is 1e-05 there, 1e-06 here"),
    ],
)
def test_export_to_marian_refuses_by_name(settings: dict[str, Any], named: str, tmp_path: Path) -> None:
    base = preset("tiny-translator").model_dump() | {"norm_position": "post", "sinusoid": "halves"}
    base |= {"vocab_size": 300, "tie": "all"}
    network = build(ModelConfig.build(base | settings))
    save_model(tmp_path / "ours", network, tokenizer())
    with pytest.raises(UserError, match=named):
        export_model(load_model(tmp_path / "ours"), tmp_path / "hf", "hf")
    assert not (tmp_path / "hf").exists()


def test_pickles_and_missing_files_are_refused(tmp_path: Path) -> None:
    saved("llama2", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="is a pickle, which can run code"):
        read_foreign(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(UserError, match=r"model\.safetensors is missing"):
        read_foreign(tmp_path)


def test_a_tensor_too_many_or_too_few_is_named(tmp_path: Path) -> None:
    saved("gpt2", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"transformer.h.0.extra.weight": torch.ones(2)}, file)
    with pytest.raises(UserError, match=r"transformer\.h\.0\.extra\.weight: no part of ours holds this"):
        read_foreign(tmp_path)
    save_file({name: tensor for name, tensor in tensors.items() if "h.1.attn.c_attn.w" not in name}, file)
    with pytest.raises(UserError, match=r"transformer\.h\.1\.attn\.c_attn\.weight is missing"):
        read_foreign(tmp_path)
    save_file(tensors | {"transformer.h.1.attn.c_attn.weight": torch.ones(48, 143)}, file)
    with pytest.raises(UserError, match=r"c_attn\.weight is \(48, 143\), but 144 rows are due"):
        read_foreign(tmp_path)


def test_an_exported_folder_never_replaces_anything(tmp_path: Path) -> None:
    saved("llama2", tmp_path / "theirs")
    import_model(tmp_path / "theirs", tmp_path / "ours")
    with pytest.raises(UserError, match="is there already"):
        export_model(load_model(tmp_path / "ours"), tmp_path / "theirs", "hf")
    with safe_open(tmp_path / "theirs" / "model.safetensors", "pt") as file:
        assert "lm_head.weight" in list(file.keys())


def test_weights_of_several_kinds_become_the_widest_and_unknown_kinds_are_refused(tmp_path: Path) -> None:
    theirs = saved("llama2", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    mixed = {name: tensor.half() if tensor.dim() > 1 else tensor for name, tensor in tensors.items()}
    save_file(mixed, file)
    assert {tensor.dtype for tensor in read_foreign(tmp_path).weights.values()} == {torch.float32}
    for parameter in theirs.parameters():
        if parameter.dim() > 1:
            parameter.data = parameter.data.half().float()
    assert_same(read_and_build(tmp_path), theirs)
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"].to(torch.float8_e4m3fn)}, file)
    with pytest.raises(UserError, match=r"weights as torch\.float8_e4m3fn cannot be represented"):
        read_foreign(tmp_path)
    save_file(tensors | {"model.norm.weight": torch.ones(64, dtype=torch.int8)}, file)
    with pytest.raises(UserError, match=r"norm\.weight holds torch\.int8"):
        import_model(tmp_path, tmp_path / "ours")


def test_a_tensor_in_two_shards_and_a_shard_outside_the_folder_are_refused(tmp_path: Path) -> None:
    saved("llama2", tmp_path / "theirs", max_shard_size="60KB")
    first, second, *_ = sorted((tmp_path / "theirs").glob("model-*.safetensors"))
    whole = second.read_bytes()
    save_file(load_file(second) | load_file(first), second)
    with pytest.raises(UserError, match="stands in two files"):
        read_foreign(tmp_path / "theirs")
    second.write_bytes(whole)
    index = tmp_path / "theirs" / "model.safetensors.index.json"
    first.rename(tmp_path / "elsewhere.safetensors")
    index.write_text(index.read_text().replace(first.name, "../elsewhere.safetensors"))
    with pytest.raises(UserError, match="names files that are missing"):
        read_foreign(tmp_path / "theirs")
