"""Imported models generate what their own library does, alike by single calls, streams and the engine."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Engine
from tokenizers.decoders import Metaspace as Spaced
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Metaspace

from clearhead.checkpoint.formats import import_model
from clearhead.errors import UserError
from clearhead.predict import Model, engine_for, generate_batch_texts, load, submit
from tests.checkpoint.formats.peers import WORDS, peer
from tests.cli.models import make
from tests.corpora import corpus

PAD = WORDS - 1
TEXTS = ["w7 w8 w9", "", "w5", "  ", "w11 w12 w13 w14 w15 w16 w17 w18", "w20 w21 w22 w23 w24", "w5 w5"]


def engine_texts(model: Model, texts: list[str], **options: Any) -> list[str]:
    """The texts of jobs of one engine, three rows at a time."""
    engine = engine_for(model, max_batch_size=3)
    jobs = [submit(model, engine, text, **options) for text in texts]
    while engine.busy:
        engine.step()
    return [job.text for job in jobs]


def imported(folder: Path, name: str, settings: dict[str, Any]) -> tuple[Any, Model]:
    """A random model of transformers with the vocabulary w0 w1 …, and ours imported from its folder, both in fp64."""
    torch.manual_seed(3)
    theirs = peer(name).double()
    vocabulary = {"</s>": 0, **{f"▁w{number}": number for number in range(1, PAD)}, "<pad>": PAD}
    words = Engine(WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer, words.decoder = Metaspace(), Spaced()
    words.add_special_tokens(["</s>", "<pad>"])
    for key, value in settings.items():
        setattr(theirs.generation_config, key, value)
    if name.startswith("marian"):  # without a ban it would generate pads; it ends at times
        theirs.final_logits_bias[0, PAD] += 4
        theirs.final_logits_bias[0, 0] += 2
    theirs.save_pretrained(folder / "theirs")
    words.save(str(folder / "theirs" / "tokenizer.json"))
    import_model(folder / "theirs", folder / "ours")
    return theirs, load(folder / "ours", "cpu", "fp64")


@pytest.fixture(scope="module")
def marian(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Model]:
    """A source ends with </s>; a target begins with the pad, which is never generated, nor is w9 after w8."""
    settings = {"bad_words_ids": [[PAD], [8, 9]]}
    return imported(tmp_path_factory.mktemp("marian"), "marian", settings)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Model]:
    """Any of five tokens ends a text."""
    return imported(tmp_path_factory.mktemp("llama"), "llama2", {"eos_token_id": [0, 40, 41, 42, 43]})


def test_marian_translates_as_in_transformers(marian: tuple[Any, Model]) -> None:
    theirs, model = marian
    assert model.extra["begin"] == [PAD]
    assert model.extra["banned_ids"] == [[PAD], [8, 9]]
    found = [result.text for result in model.translate(TEXTS, max_new_tokens=30, no_repeat_ngram_size=2)]
    for text, ours in zip(TEXTS, found, strict=True):
        if not text.strip():
            assert ours == ""
            continue
        ids = torch.tensor([[*model.tokenizer.encode(text), 0]])
        wanted = theirs.generate(ids, num_beams=1, do_sample=False, max_new_tokens=30, no_repeat_ngram_size=2)
        assert ours == model.tokenizer.decode(wanted[0].tolist())
    assert len(set(found)) == 6, "different texts are translated differently"
    lengths = [len(text.split()) for text in found]
    assert 30 in lengths
    assert any(0 < length < 30 for length in lengths), lengths


@pytest.mark.parametrize(
    "options", [{"no_repeat_ngram_size": 2}, {"max_new_tokens": 9}, {"temperature": 1.0, "banned_ids": ((7,),)}]
)
def test_marian_translates_alike_through_the_engine(marian: tuple[Any, Model], options: dict[str, Any]) -> None:
    model = marian[1]
    found = [result for _, result in generate_batch_texts(model, TEXTS, **options)]
    assert found == model.translate(TEXTS, **options)
    if "temperature" not in options:
        assert engine_texts(model, TEXTS, **options) == [result.text for result in found]
        assert found == [model.translate(text, **options) for text in TEXTS], "alone or in a batch"


def test_the_banned_tokens_of_a_model_stay_banned_with_those_of_the_user(marian: tuple[Any, Model]) -> None:
    model = marian[1]
    unbanned = Model(model.network, model.tokenizers, {**model.extra, "banned_ids": []})
    text, other = TEXTS[0], [[7]]
    output = unbanned.translate(text, max_new_tokens=9, logprobs=True, banned_ids=other)
    ours = model.translate(text, max_new_tokens=9, logprobs=True, banned_ids=other)
    assert ours.score is not None
    assert output.score is not None
    assert ours.score < output.score, "without a ban it would generate pads"
    assert ours == model.translate(text, max_new_tokens=9, logprobs=True, banned_ids=[*other, [PAD], [8, 9]])


def test_any_of_several_eos_tokens_ends_a_text(llama: tuple[Any, Model]) -> None:
    theirs, model = llama
    assert model.extra["eos_ids"] == [0, 40, 41, 42, 43]
    texts = [f"w{number} w{2 * number} w30" for number in range(1, 30)]
    single = model.generate(texts, max_new_tokens=25)
    assert any(text.finished for text in single)
    assert any(not text.finished for text in single)
    for text, ours in zip(texts, single, strict=True):
        ids = torch.tensor([model.prompt_ids(text)])
        wanted = theirs.generate(ids, do_sample=False, max_new_tokens=25)[0, ids.shape[1] :].tolist()
        ended = wanted[-1] in model.extra["eos_ids"]
        assert (ours.text, ours.finished) == (model.tokenizer.decode(wanted[:-1] if ended else wanted), ended)
    assert [text for _, text in generate_batch_texts(model, texts, max_new_tokens=25)] == single
    assert engine_texts(model, texts, max_new_tokens=25) == [text.text for text in single]
    assert ["".join(model.stream(text, max_new_tokens=25)) for text in texts] == [text.text for text in single]


def test_the_banned_tokens_of_a_decoder_are_banned_everywhere(llama: tuple[Any, Model]) -> None:
    plain = llama[1]
    prompts = ["w1", "w2 w3", "w4"]
    first = [plain.tokenizer.encode(result.text)[0] for result in plain.generate(prompts, max_new_tokens=8)]
    model = Model(plain.network, plain.tokenizers, plain.extra | {"banned_ids": [[number] for number in first]}, "m")
    single = [result.text for result in model.generate(prompts, max_new_tokens=8)]
    assert all(not set(model.tokenizer.encode(text)) & set(first) for text in single)
    assert engine_texts(model, prompts, max_new_tokens=8) == single
    assert ["".join(model.stream(prompt, max_new_tokens=8)) for prompt in prompts] == single


def test_a_ctranslate2_model_translates_alike_through_the_engine(tmp_path: Path) -> None:
    import_model(corpus("weights/aren_transliteration"), tmp_path / "ours")
    model = load(tmp_path / "ours", "cpu", "fp64")
    assert model.extra["source_end"] is False
    texts = ["آتزمون", "", "آتشيسون", "م", "محمد" * 5, "قلم"]
    single = [result.text for result in model.translate(texts)]
    assert single[0] == "atzmon"
    assert engine_texts(model, texts) == single
    assert [text.text for _, text in generate_batch_texts(model, texts)] == single


def test_a_llama2c_model_generates_alike_through_the_engine(tmp_path: Path) -> None:
    import_model(corpus("weights/stories260K/stories260K.bin"), tmp_path / "ours")
    model = load(tmp_path / "ours", "cpu", "fp64")
    assert len(model.extra["eos_ids"]) == 2
    texts = ["Once upon a time", "Tim", "", "The dog\u2014née 🐈"]
    single = model.generate(texts, max_new_tokens=30)
    assert [text for _, text in generate_batch_texts(model, texts, max_new_tokens=30)] == single
    assert engine_texts(model, texts, max_new_tokens=30) == [text.text for text in single]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"begin": "x"}, "begin"),
        ({"begin": [99_999]}, "begin: token 99999 is outside the vocabulary"),
        ({"eos_ids": [-1]}, r"eos_ids.0: -1 is too small"),
        ({"eos_ids": 7}, "eos_ids"),
        ({"banned_ids": [5]}, "banned_ids"),
        ({"banned_ids": {"a": 1}}, "banned_ids"),
        ({"source_end": "no"}, "source_end: 'no' is neither true nor false"),
    ],
)
def test_invalid_special_tokens_in_config_json_are_named(extra: dict[str, Any], message: str, tmp_path: Path) -> None:
    for family, verb in (("tiny-translator", Model.translate), ("tiny-gpt", Model.generate)):
        plain = load(make(tmp_path / family, family), "cpu")
        for act in (lambda model, verb=verb: verb(model, "a man"), engine_for):
            with pytest.raises(UserError, match=f"^config.json: {message}[^\n]*$"):
                act(replace(plain, extra=plain.extra | extra))


def test_banned_ids_of_config_json_are_never_generated(tmp_path: Path) -> None:
    plain = load(make(tmp_path / "gpt", "tiny-gpt"), "cpu")
    first = plain.generate("a man", max_new_tokens=8).ids[0]
    model = replace(plain, extra=plain.extra | {"banned_ids": [[7], [first]]})
    assert model.special_tokens == plain.special_tokens.model_copy(update={"banned_ids": ((7,), (first,))})
    assert not {7, first} & set(model.generate("a man", max_new_tokens=8).ids)
