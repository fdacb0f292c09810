"""CTranslate2: its published model in, our models out, the same scores and translations on both sides."""

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clearhead.checkpoint import load_model, save_model
from clearhead.checkpoint.formats import export_model, import_model, read_foreign
from clearhead.config import ModelConfig
from clearhead.errors import UserError
from clearhead.model import build
from clearhead.predict import load
from tests.checkpoint.small import tokenizer
from tests.corpora import corpus

INPUTS = int(os.environ.get("CLEARHEAD_INPUTS", "200"))
SIZES: dict[str, Any] = {"dim": 32, "heads": 4, "ff_dim": 48, "vocab_size": 300, "max_positions": 48}
BOTH = SIZES | {"family": "encoder-decoder", "encoder_layers": 2, "decoder_layers": 3, "norm_eps": 1e-4}
DECODER = SIZES | {"family": "decoder", "decoder_layers": 2}
LLAMA = DECODER | {"activation": "swiglu", "norm": "rms", "bias": False, "position": "rotary", "norm_eps": 1e-4}
TRANSLATORS: dict[str, dict[str, Any]] = {
    "paper": BOTH | {"norm_position": "post", "tie": "all", "scale_embedding": True},
    "halves": BOTH | {"norm_position": "post", "sinusoid": "halves", "tie": "output", "activation": "gelu"},
    "pre": BOTH | {"position": "learned", "activation": "silu", "output_bias": True},
    "no-positions": BOTH | {"position": "none"},
}
DECODERS: dict[str, dict[str, Any]] = {
    "gpt2": DECODER | {"position": "learned", "activation": "gelu_tanh", "tie": "output"},
    "gpt": DECODER | {"position": "sinusoidal", "norm_position": "post", "output_bias": True},
    "llama": LLAMA,
    "grouped": LLAMA | {"kv_heads": 2, "tie": "output", "rope_theta": 500.0},
}
TOKENS = tokenizer()


@pytest.fixture(scope="module")
def ctranslate2() -> Any:
    return pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed")


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The published model, imported."""
    folder = tmp_path_factory.mktemp("names") / "ours"
    import_model(corpus("weights/aren_transliteration"), folder)
    return folder


def exported(settings: dict[str, Any], folder: Path) -> Any:
    network = build(ModelConfig.build(settings)).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.15)
    save_model(folder / "ours", network, TOKENS)
    export_model(load_model(folder / "ours"), folder / "out", "ctranslate2")
    return load_model(folder / "ours").network


def words(ids: list[int]) -> list[str]:
    return [TOKENS.token(number) for number in ids]


def test_published_names_are_written_in_latin_letters(names: Path) -> None:
    model = load(names, device="cpu")
    assert model.translate(["آتزمون", "آتشيسون"]) == ["atzmon", "achison"]
    assert model.translate(["آتزمون", "آتشيسون"], beam=1) == ["atzmon", "achison"]


def test_its_own_library_agrees_on_invented_names(names: Path, ctranslate2: Any) -> None:
    theirs = ctranslate2.Translator(str(corpus("weights/aren_transliteration")), intra_threads=1)
    model, chance = load(names, device="cpu"), random.Random(0)
    letters = sorted(token for token in model.tokenizer.vocabulary if len(token) == 1 and token.isalpha())
    texts = ["".join(chance.choices(letters, k=chance.randint(2, 9))) for _ in range(INPUTS)]
    length = {"min_decoding_length": 0, "max_decoding_length": 40}  # by default it leaves out texts that end at once
    for beam, options in ((1, {}), (4, {"early_stopping": "full"})):  # its rule: done when so many are finished
        found = theirs.translate_batch([list(text) for text in texts], beam_size=beam, return_scores=True, **length)
        mine = model.translations(texts, beam=beam, max_new_tokens=40, scores=True, **options)
        assert [text for [(text, *_)] in mine] == ["".join(each.hypotheses[0]) for each in found]
        np.testing.assert_allclose([each.score for [each] in mine], [each.scores[0] for each in found], atol=1e-5)


def test_there_and_back_it_translates_the_same(names: Path, ctranslate2: Any, tmp_path: Path) -> None:
    export_model(load_model(names), tmp_path / "out", "ctranslate2")
    theirs = ctranslate2.Translator(str(tmp_path / "out"), intra_threads=1)
    found = theirs.translate_batch([list("آتزمون"), list("آتشيسون")])
    assert ["".join(each.hypotheses[0]) for each in found] == ["atzmon", "achison"]


@pytest.mark.parametrize("name", TRANSLATORS)
def test_translators_score_texts_as_ours_do(name: str, ctranslate2: Any, tmp_path: Path) -> None:
    network = exported(TRANSLATORS[name], tmp_path)
    theirs = ctranslate2.Translator(str(tmp_path / "out"), intra_threads=1)
    begin, end = TOKENS.id("begin"), TOKENS.id("end")
    for length in (1, 7, 30):
        source, target = torch.randint(5, 280, (length,)).tolist(), torch.randint(5, 280, (length + 3,)).tolist()
        [found] = theirs.score_batch([words(source)], [words(target)])
        with torch.no_grad():
            logits = network(torch.tensor([[*source, end]]), torch.tensor([[begin, *target]]))[0]
        expected = logits.log_softmax(-1)[torch.arange(len(target) + 1), torch.tensor([*target, end])]
        np.testing.assert_allclose(found.log_probs, expected.numpy(), atol=2e-4)


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_give_our_logits(name: str, ctranslate2: Any, tmp_path: Path) -> None:
    network = exported(DECODERS[name], tmp_path)
    theirs = ctranslate2.Generator(str(tmp_path / "out"), intra_threads=1)
    ids = torch.randint(5, 280, (1, 40))
    found = np.array(theirs.forward_batch([words(ids[0].tolist())]))
    with torch.no_grad():
        expected = network(ids).numpy()
    assert expected.std() > 0.1
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_a_decoder_whose_texts_begin_with_nothing_goes_there_too(ctranslate2: Any, tmp_path: Path) -> None:
    network = build(ModelConfig.build(LLAMA)).eval()
    save_model(tmp_path / "ours", network, TOKENS, {"begin": []})
    export_model(load_model(tmp_path / "ours"), tmp_path / "out", "ctranslate2")
    theirs = ctranslate2.Generator(str(tmp_path / "out"), intra_threads=1)
    with pytest.raises(UserError, match="CTranslate2's layout of version 6 cannot be represented"):
        read_foreign(tmp_path / "out")
    with torch.no_grad():
        np.testing.assert_allclose(
            np.array(theirs.forward_batch([words([9, 10])])), network(torch.tensor([[9, 10]])).numpy(), atol=1e-4
        )


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (SIZES | {"family": "encoder", "encoder_layers": 1}, "family: encoder"),
        (BOTH | {"norm": "batch"}, "norm: batch"),
        (BOTH | {"kv_heads": 2}, "kv_heads: 2 of 4, in a translator"),
        (DECODER | {"attention": "window", "window": 4}, "attention: window"),
        (DECODER | {"bias": False}, "bias: false, with layer norms"),
        (LLAMA | {"rope_scaling": {"factor": 8.0}}, "rope_scaling"),
    ],
)
def test_what_it_has_no_place_for_is_refused_by_name(
    settings: dict[str, Any], named: str, ctranslate2: Any, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=named):
        exported(settings, tmp_path)
    assert not (tmp_path / "out").exists()


def test_what_is_banned_here_is_never_written_there(ctranslate2: Any, tmp_path: Path) -> None:
    network = build(ModelConfig.build(TRANSLATORS["paper"])).eval()
    save_model(tmp_path / "ours", network, TOKENS, {"banned": [[7]]})
    export_model(load_model(tmp_path / "ours"), tmp_path / "out", "ctranslate2")
    theirs = ctranslate2.Translator(str(tmp_path / "out"), intra_threads=1)
    [found] = theirs.score_batch([words([9, 10])], [words([8, 7, 9])])
    assert found.log_probs[1] < -1e6
    assert min(found.log_probs[0], found.log_probs[2]) > -100
    save_model(tmp_path / "rows", network, TOKENS, {"banned": [[7, 8]]})
    with pytest.raises(UserError, match="banned: rows of several tokens"):
        export_model(load_model(tmp_path / "rows"), tmp_path / "none", "ctranslate2")
