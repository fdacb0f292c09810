"""Loaded models: texts are cleaned as in training; devices, families and dtypes that do not fit are one-line errors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from clearhead.checkpoint import save_model
from clearhead.config import GenerationConfig, preset
from clearhead.errors import UserError
from clearhead.inference import translate
from clearhead.model import build
from clearhead.ops.linear.packed_weight import NativeLinear
from clearhead.ops.linear.quantized import QuantizedLinear
from clearhead.predict import Model, load
from clearhead.text import ROLES, train

SMALL = ("dim=16", "heads=2", "ff_dim=32", "max_positions=64")


def saved(folder: Path, name: str, **data: Any) -> Path:
    """The folder of a tiny model with the vocabulary `a man sees café` and these data settings."""
    words = train(["a man sees café"] * 9, "word", 16, roles=ROLES)
    config = preset(name, [*SMALL, f"vocab_size={len(words)}"])
    save_model(folder, build(config), words, {"data": data})
    return folder


def best(model: Model, text: str, **options: Any) -> tuple[str, float | None]:
    result = model.translate(text, beam=2, max_new_tokens=5, logprobs=True, **options)
    return result.text, result.score


def test_texts_are_translated_as_the_training_data_was_cleaned(tmp_path: Path) -> None:
    plain = load(saved(tmp_path / "plain", "tiny-translator", task="translation"), "cpu")
    assert best(plain, "A Man") != best(plain, "a man")
    cleaning = {"lowercase": True, "normalize": "nfc"}
    clean = load(saved(tmp_path / "clean", "tiny-translator", task="translation", **cleaning), "cpu")
    assert best(clean, "A Man") == best(clean, "a man")
    assert best(clean, "cafe\u0301") == best(clean, "café") != best(clean, "a man")
    assert best(clean, "a man", prefix="A Man") == best(clean, "a man", prefix="a man")


def test_prompts_are_cleaned_as_the_training_data_was(tmp_path: Path) -> None:
    model = load(saved(tmp_path / "model", "tiny-gpt", task="language-model", lowercase=True), "cpu")
    upper, lower = (model.generate(prompt, max_new_tokens=5) for prompt in ("A Man", "a man"))
    assert upper == lower
    assert model.prompt_ids("A Man") == model.prompt_ids("a man")


def test_a_missing_device_is_named_before_the_model_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device, says in (("cuda", "torch sees no GPU"), ("tpu", "'tpu' is not a device"), ("meta", "not supported")):
        with pytest.raises(UserError, match=f"device: .*{says}"):
            load(tmp_path / "nowhere", device)


def test_a_method_of_another_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"generate: .* is an encoder-decoder; it can translate"):
        load(saved(tmp_path / "one", "tiny-translator", task="translation"), "cpu").generate("a man")
    with pytest.raises(UserError, match=r"translate: .* is a decoder; it can generate"):
        load(saved(tmp_path / "two", "tiny-gpt", task="language-model"), "cpu").translate("a man")


def test_a_short_text_may_have_a_long_translation(tmp_path: Path) -> None:
    model = load(saved(tmp_path / "model", "tiny-translator", task="translation"), "cpu")
    word, roles = model.tokenizer.encode("café"), model.tokenizer.roles
    special = tuple((number,) for role, number in roles.items() if role != "end")  # not text
    long = model.translate("a", min_new_tokens=50, banned_ids=special)
    forced = model.translate("a", forced_ids=(tuple(word * 45),))
    assert len(long.text.split()) >= 50
    assert forced.text.count("café") >= 45
    with pytest.raises(UserError, match="min_new_tokens: 70 is more than max_new_tokens 64"):
        model.translate("a", min_new_tokens=70)


def test_a_model_without_tokenizer_works_on_ids(tmp_path: Path) -> None:
    network = build(preset("tiny-gpt")).eval()
    save_model(tmp_path / "model", network, ())
    model, ids = load(tmp_path / "model", "cpu"), torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        assert torch.equal(model.logits(ids), network(ids))
    with pytest.raises(UserError, match=r"model has no tokenizer\.json"):
        model.generate("a man")


def test_the_reference_network_stays_unchanged_by_the_inference_copy(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "tiny-translator", task="translation")
    plain, quantized = load(folder, "cpu"), load(folder, "cpu", "int8")
    assert any(isinstance(module, nn.Linear) for module in plain.network.modules())
    assert {type(module) for module in quantized.network.modules()} == {
        type(module) for module in plain.network.modules()
    }
    assert {parameter.dtype for parameter in quantized.network.parameters()} == {torch.float32}
    assert any(isinstance(module, QuantizedLinear | NativeLinear) for module in quantized.inference_network.modules())
    assert not any(isinstance(module, QuantizedLinear | nn.Linear) for module in plain.inference_network.modules())
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(quantized.logits(ids, ids), plain.logits(ids, ids))
    (text, score), (_, int8_score) = best(plain, "a man"), best(quantized, "a man")
    assert int8_score == pytest.approx(score, abs=0.1)
    assert int8_score != score
    direct = translate(
        plain.network,
        [[*plain.tokenizer.encode("a man"), plain.tokenizer.id("end")]],
        GenerationConfig(beam=2, max_new_tokens=5),
        bos_id=plain.tokenizer.id("begin"),
        eos_ids=plain.tokenizer.id("end"),
    )[0][0]
    assert (plain.tokenizer.decode(direct.ids), direct.score) == (text, pytest.approx(score, abs=1e-5))
    with pytest.raises(UserError, match="dtype: 'int7' is not allowed; use fp32, bf16, fp16, fp64, int8 or int4"):
        load(folder, "cpu", "int7")
