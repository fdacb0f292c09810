"""The public API of a model: one text in, one result out; typed options, readable results, one-line errors."""

import json
import sys
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from pydantic.fields import FieldInfo

import clearhead
from clearhead.config import EngineConfig, GenerationConfig
from clearhead.config.dtypes import DTYPES, parse_dtype
from clearhead.config.settings import Settings
from clearhead.errors import UserError
from clearhead.predict import Answer, GenerationResult, Model, Translation, load
from clearhead.predict.options import EngineOptions, GenerationOptions
from clearhead.predict.results import MaskToken
from tests.cli.models import make
from tests.predict.task_models import task_model


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(make(tmp_path_factory.mktemp("results") / "gpt", "tiny-gpt"), "cpu", "fp64")


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(make(tmp_path_factory.mktemp("results") / "tr", "tiny-translator"), "cpu", "fp64")


@pytest.mark.parametrize(("options", "config"), [(GenerationOptions, GenerationConfig), (EngineOptions, EngineConfig)])
def test_typed_options_are_the_keys_and_types_of_the_config(options: Any, config: type[Settings]) -> None:
    hints = get_type_hints(options)
    assert list(hints) == list(config.model_fields)

    def plain(field: FieldInfo) -> str:
        kind = str(field.annotation)
        return "ids" if "tuple[typing.Annotated" in kind else kind

    for name, field in config.model_fields.items():
        expected = str(hints[name])
        assert plain(field) == ("ids" if "Sequence[int]" in expected else expected), name


def test_one_text_gives_one_result_and_a_list_a_list(gpt: Model, translator: Model) -> None:
    for model, method in ((gpt, gpt.generate), (translator, translator.translate)):
        one = method("a man", max_new_tokens=5)
        assert isinstance(one, GenerationResult)
        assert method(["a man", "the dog"], max_new_tokens=5)[0] == one
        assert method(("a man",), max_new_tokens=5) == [one]
        assert method([], max_new_tokens=5) == []
        assert model.tokenizers[-1].decode(one.ids) == one.text == str(one)
    for output, act, text in (
        ("lm", Model.fill, "a <mask>"),
        ("classes", Model.classify, "a cat"),
        ("tags", Model.tag, "a cat"),
    ):
        model = task_model(output)
        assert act(model, [text]) == [act(model, text)]
    model = task_model("span")
    assert model.answer(["who?"], "The cat") == [model.answer("who?", "The cat")]
    vectors = task_model("").embed(["a cat"])
    assert np.array_equal(task_model("").embed("a cat"), vectors[0])
    regression = task_model("classes")
    regression.extra["task"] = "regression"
    assert regression.regress(["a cat"]) == [regression.regress("a cat")]


def test_an_n_best_list_has_each_text_once_with_its_best_score(translator: Model) -> None:
    target = translator.tokenizers[-1]
    twin = Model(translator.network, translator.tokenizers, translator.extra, "twin")
    wide = translator.translate("a man", beam=8, n_best=8, max_new_tokens=3)
    decode = target.decode
    last_letter = {each.ids: decode(each.ids)[-1:] for each in wide.candidates}  # several sequences, the same text
    assert len({*last_letter.values()}) < len(last_letter)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(target), "decode", lambda self, ids, special_tokens=False: decode(ids)[-1:])
        best = twin.translate("a man", beam=8, n_best=3, max_new_tokens=3)
    texts = [each.text for each in best.candidates]
    assert texts == list(dict.fromkeys(last_letter.values()))[:3]
    assert len(texts) == 3, "of eight hypotheses, the best of each text"
    for each in best.candidates:
        assert each.ids == next(ids for ids, text in last_letter.items() if text == each.text)


def test_candidates_are_best_first_and_hold_the_result_itself(gpt: Model, translator: Model) -> None:
    best = translator.translate("a man", beam=4, n_best=3, max_new_tokens=5)
    assert len(best.candidates) == 3
    assert best.candidates[0].text == best.text
    assert all(isinstance(each, Translation) and each.candidates == (each,) for each in best.candidates)
    scores = [each.score or 0.0 for each in best.candidates]
    assert scores == sorted(scores, reverse=True)
    assert len(gpt.generate("a man", samples=3, temperature=1.0, max_new_tokens=5).candidates) == 3
    assert gpt.generate("a man", max_new_tokens=5).candidates == (gpt.generate("a man", max_new_tokens=5),)


def test_results_are_json_ready_and_short_in_a_shell(translator: Model) -> None:
    best = translator.translate("a man", beam=2, n_best=2, align=True, max_new_tokens=5)
    data = json.loads(json.dumps(best.to_dict(), allow_nan=False))
    assert [each["text"] for each in data["candidates"]] == [each.text for each in best.candidates]
    assert best.alignment is not None
    assert data["alignment"]["links"] == [list(pair) for pair in best.alignment.links]
    assert "others" not in data
    assert "candidates" not in best.candidates[1].to_dict()
    assert repr(Translation("Guten Tag!", score=-0.12345)) == "Translation(text='Guten Tag!', score=-0.1235)"
    assert repr(Answer("x" * 99, 0, 99, 0.5)) == f"Answer(text='{'x' * 59}…', start=0, end=99, score=0.5)"
    assert MaskToken("a", float("nan")).to_dict() == {"text": "a", "score": None}
    for output, act in (("lm", lambda m: m.fill("a <mask>")), ("classes", lambda m: m.classify("a cat"))):
        result = act(task_model(output))
        json.dumps(result.to_dict(), allow_nan=False)
        assert len(repr(result)) < 400
        assert "\n" not in repr(result)
    tagging = task_model("tags").tag("The cat")
    assert [word["text"] for word in tagging.to_dict()["words"]] == ["The", "cat"]


def test_a_model_is_summarized_in_five_lines(gpt: Model) -> None:
    lines = repr(clearhead.load("en-de", "cpu")).splitlines()
    assert lines == [
        "en-de: encoder-decoder for translation",
        "4 encoder + 2 decoder layers, dim 256, 4 heads, vocabulary 5,000",
        "4,971,008 parameters, fp32 on cpu",
        "tokenizer: BPE of 5,000 tokens",
        "can translate, evaluate, inspect, export",
    ]
    assert len(repr(gpt).splitlines()) == 5
    assert "fp64 on cpu" in repr(gpt)
    assert "none, ids only" in repr(Model(gpt.network, ()))


def test_wrong_arguments_are_one_line_errors(gpt: Model, translator: Model) -> None:
    for act, message in (
        (lambda: translator.translate(5), "translate: int is not a text; give a string, or a list of strings"),  # type: ignore[call-overload]
        (lambda: translator.translate(["a", 5]), "text 2: int, not a string; give some text"),  # type: ignore[list-item]
        (lambda: gpt.generate(b"a"), "generate: bytes is not a text"),  # type: ignore[call-overload]
        (lambda: gpt.generate("a", max_tokens=3), "max_tokens: unknown setting; did you mean max_new_tokens"),  # type: ignore[call-overload]
        (lambda: gpt.generate("a", top_k="many"), "top_k: 'many' is not a whole number"),  # type: ignore[call-overload]
        (lambda: gpt.generate("a", stop=[""]), "stop: not a list of strings with at least one character each"),
        (lambda: gpt.generate("a", draft="prompt-lookup", beam=2, max_new_tokens=5), "use beam=1"),
        (lambda: gpt.alternatives("a", prefix="b"), "prefix: only translators support it"),
        (lambda: gpt.inspect("a", "b"), "target: a decoder reads one text"),
        (lambda: translator.inspect(""), "inspect: the text is empty"),
        (lambda: gpt.export("x", to="gguff"), "to: 'gguff' is not allowed; did you mean gguf?"),
        (lambda: translator.logits(torch.ones(1, 1, dtype=torch.long)), "logits: a translator needs target_ids"),
        (lambda: parse_dtype("float31"), "dtype: 'float31' is not allowed; use fp32, bf16, fp16, fp64, int8 or int4"),
    ):
        with pytest.raises(UserError, match=r"^[^\n]*$") as error:
            act()
        assert message in str(error.value)


def test_dtypes_have_a_short_name_and_that_of_torch() -> None:
    assert [parse_dtype(name) for name in DTYPES.values()] == [parse_dtype(name) for name in DTYPES] == list(DTYPES)
    with pytest.raises(UserError, match=r"train\.precision: 'int8' is not allowed; use fp32 or bf16"):
        parse_dtype("int8", ("fp32", "bf16"), "train.precision")


@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-translator"])
def test_a_draft_never_changes_the_text(name: str, tmp_path: Path, gpt: Model, translator: Model) -> None:
    model = gpt if name == "tiny-gpt" else translator
    method: Any = model.generate if name == "tiny-gpt" else model.translate
    other = load(make(tmp_path / "draft", name), "cpu", "fp64")
    with torch.no_grad():
        for parameter in other.network.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    texts = ["a man sees the dog", "the dog", "a café"]
    for options in ({"max_new_tokens": 20}, {"max_new_tokens": 20, "temperature": 1.0, "seed": 3}):
        expected = method(texts, **options)
        for draft in (other, str(tmp_path / "draft"), "prompt-lookup", model):
            assert method(texts, draft=draft, **options) == expected
    if name == "tiny-gpt":
        pieces = gpt.stream(texts[0], draft="prompt-lookup", max_new_tokens=20)
        assert "".join(pieces) == gpt.generate(texts[0], max_new_tokens=20).text
    assert list(model.engines["drafts"]) == [str(tmp_path / "draft")], "a draft is loaded once"


def test_a_draft_of_another_vocabulary_or_family_is_refused(gpt: Model, translator: Model) -> None:
    with pytest.raises(UserError, match=r"draft: .* is an encoder-decoder, but .* is a decoder; use the same family"):
        gpt.generate("a", draft=translator)
    with pytest.raises(UserError, match=r"draft: novels-gpt has another vocabulary than .*or draft='prompt-lookup'"):
        gpt.generate("a", draft="novels-gpt")


def test_alternatives_complete_the_most_likely_next_tokens(gpt: Model, translator: Model) -> None:
    results = gpt.alternatives("a man", 3, max_new_tokens=5)
    ids = torch.tensor([gpt.prompt_ids("a man")])
    assert [each.ids[0] for each in results] == gpt.logits(ids)[0, -1].topk(3).indices.tolist()
    assert results[0].text == gpt.generate("a man", max_new_tokens=5).text
    best = translator.translate("the dog", max_new_tokens=5)
    first = translator.tokenizers[-1].decode(best.ids[:1])
    results = translator.alternatives("the dog", 3, prefix=first, max_new_tokens=4)
    assert len({each.text for each in results}) == 3
    assert all(each.text.startswith(first) for each in results)
    assert results[0].text == best.text


def test_a_model_saved_and_exported_gives_the_same_text(
    gpt: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = gpt.generate("a man", max_new_tokens=9)
    gpt.save(tmp_path / "saved")
    assert load(tmp_path / "saved", "cpu", "fp64").generate("a man", max_new_tokens=9) == expected
    clearhead.load("novels-gpt", "cpu").export(tmp_path / "hf", to="hf")
    assert (tmp_path / "hf" / "config.json").exists()
    # Without native steps, only quantized weights are kept.
    monkeypatch.setattr(sys.modules["clearhead.predict.load"], "native_refuses", lambda *_: "turned off")
    quantized = load(tmp_path / "saved", "cpu", "int8")
    for act in (quantized.save, quantized.export):
        with pytest.raises(UserError, match="was loaded with quantized weights only; load it without dtype"):
            act(tmp_path / "again")


def test_the_package_names_everything_and_imports_it_lazily() -> None:
    assert set(clearhead.__all__) <= set(dir(clearhead))
    for name in clearhead.__all__:
        assert getattr(clearhead, name) is not None
    with pytest.raises(AttributeError, match="module 'clearhead' has no attribute 'lod'"):
        clearhead.lod  # type: ignore[attr-defined]  # noqa: B018


def test_a_decoder_returns_at_most_n_best_texts() -> None:
    result = clearhead.load("novels-gpt", "cpu").generate("The old house", max_new_tokens=6, beam=6, n_best=2)
    assert len(result.candidates) == 2


def test_a_text_ends_with_the_positions_unless_its_length_was_asked_for() -> None:
    model = clearhead.load("novels-gpt", "cpu")
    prompt = "the " * (model.config.max_positions - 20)
    assert 0 < len(model.generate(prompt).ids) <= 20
    assert "".join(model.stream(prompt)) == model.generate(prompt).text
    with pytest.raises(clearhead.UserError, match="max_new_tokens"):
        model.generate(prompt, max_new_tokens=256)
