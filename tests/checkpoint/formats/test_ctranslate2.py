"""CTranslate2: a published model imported and our models exported, with equal scores and translations."""

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
from tests.checkpoint.small_models import tokenizer
from tests.corpora import corpus

INPUTS = int(os.environ.get("CLEARHEAD_INPUTS", "200"))
SIZES: dict[str, Any] = {"dim": 32, "heads": 4, "ff_dim": 48, "vocab_size": 300, "max_positions": 48}
TRANSLATOR = SIZES | {"family": "encoder-decoder", "encoder_layers": 2, "decoder_layers": 3, "norm_eps": 1e-4}
DECODER = SIZES | {"family": "decoder", "decoder_layers": 2}
LLAMA = DECODER | {"activation": "swiglu", "norm": "rms", "bias": False, "position": "rotary", "norm_eps": 1e-4}
TRANSLATORS: dict[str, dict[str, Any]] = {
    "paper": TRANSLATOR | {"norm_position": "post", "tie": "all", "scale_embedding": True},
    "halves": TRANSLATOR | {"norm_position": "post", "sinusoid": "halves", "tie": "output", "activation": "gelu"},
    "pre": TRANSLATOR | {"position": "learned", "activation": "silu", "output_bias": True},
    "m2m100": TRANSLATOR | {"sinusoid": "fairseq", "position_offset": 2, "tie": "all", "scale_embedding": True},
    "offset": TRANSLATOR | {"position": "learned", "position_offset": 2},
    "no-positions": TRANSLATOR | {"position": "none"},
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
def transliterator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Import the published model, which writes Arabic names in Latin letters."""
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


def token_strings(ids: list[int]) -> list[str]:
    return [TOKENS.id_to_token(number) for number in ids]


def test_the_published_model_transliterates_names(transliterator: Path) -> None:
    model = load(transliterator, device="cpu")
    assert [each.text for each in model.translate(["آتزمون", "آتشيسون"])] == ["atzmon", "achison"]
    assert [each.text for each in model.translate(["آتزمون", "آتشيسون"], beam=1)] == ["atzmon", "achison"]


def test_random_names_give_the_results_of_ctranslate2(transliterator: Path, ctranslate2: Any) -> None:
    theirs = ctranslate2.Translator(str(corpus("weights/aren_transliteration")), intra_threads=1)
    model, rng = load(transliterator, device="cpu"), random.Random(0)
    letters = sorted(token for token in model.tokenizer.vocabulary if len(token) == 1 and token.isalpha())
    texts = ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(INPUTS)]
    length = {"min_decoding_length": 0, "max_decoding_length": 40}  # by default it skips empty outputs
    for beam, options in (
        (1, {}),
        (4, {"early_stopping": "full"}),
    ):  # its rule: stop when `beam` hypotheses are finished
        results = theirs.translate_batch([list(text) for text in texts], beam_size=beam, return_scores=True, **length)
        ours = model.translate(texts, beam=beam, max_new_tokens=40, logprobs=True, **options)
        assert [each.text for each in ours] == ["".join(each.hypotheses[0]) for each in results]
        np.testing.assert_allclose([each.score for each in ours], [each.scores[0] for each in results], atol=1e-5)


def test_an_exported_import_translates_the_same(transliterator: Path, ctranslate2: Any, tmp_path: Path) -> None:
    export_model(load_model(transliterator), tmp_path / "out", "ctranslate2")
    theirs = ctranslate2.Translator(str(tmp_path / "out"), intra_threads=1)
    results = theirs.translate_batch([list("آتزمون"), list("آتشيسون")])
    assert ["".join(each.hypotheses[0]) for each in results] == ["atzmon", "achison"]


@pytest.mark.parametrize("name", TRANSLATORS)
def test_exported_translators_score_texts_as_ours(name: str, ctranslate2: Any, tmp_path: Path) -> None:
    network = exported(TRANSLATORS[name], tmp_path)
    theirs = ctranslate2.Translator(str(tmp_path / "out"), intra_threads=1)
    begin, end = TOKENS.id("begin"), TOKENS.id("end")
    for length in (1, 7, 30):
        source, target = torch.randint(5, 280, (length,)).tolist(), torch.randint(5, 280, (length + 3,)).tolist()
        [results] = theirs.score_batch([token_strings(source)], [token_strings(target)])
        with torch.no_grad():
            logits = network(torch.tensor([[*source, end]]), torch.tensor([[begin, *target]]))[0]
        expected = logits.log_softmax(-1)[torch.arange(len(target) + 1), torch.tensor([*target, end])]
        np.testing.assert_allclose(results.log_probs, expected.numpy(), atol=2e-4)


@pytest.mark.parametrize("name", DECODERS)
def test_exported_decoders_give_our_logits(name: str, ctranslate2: Any, tmp_path: Path) -> None:
    network = exported(DECODERS[name], tmp_path)
    theirs = ctranslate2.Generator(str(tmp_path / "out"), intra_threads=1)
    ids = torch.randint(5, 280, (1, 40))
    results = np.array(theirs.forward_batch([token_strings(ids[0].tolist())]))
    with torch.no_grad():
        expected = network(ids).numpy()
    assert expected.std() > 0.1
    np.testing.assert_allclose(results, expected, atol=1e-4)


def test_a_decoder_without_begin_token_is_exported(ctranslate2: Any, tmp_path: Path) -> None:
    network = build(ModelConfig.build(LLAMA)).eval()
    save_model(tmp_path / "ours", network, TOKENS, {"begin": []})
    export_model(load_model(tmp_path / "ours"), tmp_path / "out", "ctranslate2")
    theirs = ctranslate2.Generator(str(tmp_path / "out"), intra_threads=1)
    with pytest.raises(UserError, match="CTranslate2's binary version 6 is not supported"):
        read_foreign(tmp_path / "out")
    with torch.no_grad():
        np.testing.assert_allclose(
            np.array(theirs.forward_batch([token_strings([9, 10])])),
            network(torch.tensor([[9, 10]])).numpy(),
            atol=1e-4,
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (SIZES | {"family": "encoder", "encoder_layers": 1}, "family: encoder"),
        (TRANSLATOR | {"norm": "batch"}, "norm: batch"),
        (TRANSLATOR | {"kv_heads": 2}, "kv_heads: 2 of 4, in a translator"),
        (DECODER | {"attention": "window", "window": 4}, "attention: window"),
        (DECODER | {"bias": False}, "bias: false, with layer norms"),
        (LLAMA | {"rope_scaling": {"factor": 8.0}}, "rope_scaling"),
    ],
)
def test_unsupported_settings_are_named(
    settings: dict[str, Any], message: str, ctranslate2: Any, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        exported(settings, tmp_path)
    assert not (tmp_path / "out").exists()


def test_banned_tokens_are_never_generated_after_export(ctranslate2: Any, tmp_path: Path) -> None:
    network = build(ModelConfig.build(TRANSLATORS["paper"])).eval()
    save_model(tmp_path / "ours", network, TOKENS, {"banned_ids": [[7]]})
    export_model(load_model(tmp_path / "ours"), tmp_path / "out", "ctranslate2")
    theirs = ctranslate2.Translator(str(tmp_path / "out"), intra_threads=1)
    [results] = theirs.score_batch([token_strings([9, 10])], [token_strings([8, 7, 9])])
    assert results.log_probs[1] < -1e6
    assert min(results.log_probs[0], results.log_probs[2]) > -100
    save_model(tmp_path / "rows", network, TOKENS, {"banned_ids": [[7, 8]]})
    with pytest.raises(UserError, match="banned_ids: sequences of several tokens"):
        export_model(load_model(tmp_path / "rows"), tmp_path / "none", "ctranslate2")
