"""A trained post-norm translator gives the same translations in CTranslate2 and Marian.

CLEARHEAD_TRANSLATOR=runs/mine CLEARHEAD_INPUTS=1000 compares an existing run on 1,000 sentences.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from clearhead.checkpoint import load_model
from clearhead.checkpoint.formats import export_model
from clearhead.config.recipe import Recipe
from clearhead.data.grammar import Grammar
from clearhead.predict import Model, load
from clearhead.predict.find import find_model
from clearhead.train.loop import train

INPUTS = int(os.environ.get("CLEARHEAD_INPUTS", "100"))
MIN_IDENTICAL = 0.995  # fraction of translations
DATA = {"format": "embedded", "level": 1, "languages": ["en", "de"]}
RECIPE: dict[str, Any] = {
    "model": {"preset": "tiny-translator", "dim": 64, "encoder_layers": 1, "decoder_layers": 1, "ff_dim": 128}
    | {"norm_position": "post", "sinusoid": "halves", "tie": "all", "dropout": 0.0, "max_positions": 64},
    "tokenizer": {"kind": "word", "vocab_size": 600},
    "data": {
        "task": "translation",
        "train": DATA | {"count": 3000, "split": "train"},
        "max_length": 32,
        "batch_tokens": 1000,
    }
    | {"workers": 0},
    "train": {"steps": 300, "lr": 4e-3, "warmup": 50, "validate_every": 1000, "save_every": 1000, "device": "cpu"},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if existing := os.environ.get("CLEARHEAD_TRANSLATOR"):
        return Path(existing)
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLEARHEAD_CACHE", str(folder / "cache"))
        torch.manual_seed(0)
        train(Recipe.build(RECIPE, where="test"), folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def sentences(run: Path) -> list[str]:
    grammar = Grammar(3 if "CLEARHEAD_TRANSLATOR" in os.environ else 1)
    results = dict.fromkeys(grammar.example("valid", number).text("en") for number in range(2 * INPUTS))
    assert len(results) >= INPUTS
    return [*results][:INPUTS]


@pytest.fixture(scope="module")
def ours(run: Path, sentences: list[str]) -> tuple[Model, list[str]]:
    model = load(run, device="cpu")
    answers = [each.text for each in model.translate(sentences, beam=4, max_new_tokens=40)]
    assert len(set(answers)) > len(answers) // 2, "constant outputs prove nothing"
    return model, answers


def assert_same(name: str, results: list[str], expected: list[str]) -> None:
    same = sum(a == b for a, b in zip(results, expected, strict=True))
    print(f"{name}: {same} of {len(expected)} translations identical")
    assert same >= MIN_IDENTICAL * len(expected)


def test_ctranslate2_gives_the_same_translations(
    run: Path, sentences: list[str], ours: tuple[Model, list[str]], tmp_path: Path
) -> None:
    ctranslate2 = pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed")
    model = ours[0]
    options = {"early_stopping": "full"}  # its rule: stop when four hypotheses are finished
    expected = [each.text for each in model.translate(sentences, beam=4, max_new_tokens=40, **options)]
    export_model(load_model(find_model(run)), tmp_path / "out", "ctranslate2")
    theirs = ctranslate2.Translator(str(tmp_path / "out"), intra_threads=1)
    tokens = [[model.tokenizer.id_to_token(number) for number in model.tokenizer.encode(text)] for text in sentences]
    results = theirs.translate_batch(tokens, beam_size=4, max_decoding_length=40)
    target = model.tokenizers[-1]
    texts = [target.decode([target.vocabulary[token] for token in each.hypotheses[0]]) for each in results]
    assert_same("CTranslate2", texts, expected)


def test_marian_gives_the_same_translations(
    run: Path, sentences: list[str], ours: tuple[Model, list[str]], tmp_path: Path
) -> None:
    expected = ours[1]
    export_model(load_model(find_model(run)), tmp_path / "out", "hf")
    theirs = transformers.MarianMTModel.from_pretrained(tmp_path / "out").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    texts: list[str] = []
    for start in range(0, len(sentences), 100):
        batch = tokenizer(sentences[start : start + 100], return_tensors="pt", padding=True)
        batch.pop("token_type_ids", None)
        ids = theirs.generate(**batch, num_beams=4, max_new_tokens=40)
        texts += tokenizer.batch_decode(ids, skip_special_tokens=True)
    assert_same("Marian", texts, expected)
