"""Arguments of wrong types: the package's own error, from every method of a model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import clearhead
from clearhead.config import preset
from clearhead.errors import UserError
from clearhead.interpret import capture_attention
from clearhead.model import build
from clearhead.predict import load
from tests.cli.models import make
from tests.predict.task_models import task_model

WRONG: list[Any] = [5, 2.5, None, b"x", {"a": 1}, object(), [5], [None], [["a"]]]


@pytest.fixture(scope="module")
def methods(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[[Any], Any]]:
    """Every argument that a user passes."""
    folder = tmp_path_factory.mktemp("types")
    tr, gpt = (load(make(folder / name, f"tiny-{name}"), "cpu") for name in ("translator", "gpt"))
    lm, labels, tags, span, vectors = (task_model(head) for head in ("lm", "classes", "tags", "span", ""))
    short: dict[str, Any] = {"max_new_tokens": 2}
    return {
        "load": lambda wrong: clearhead.load(wrong),
        "load device": lambda wrong: clearhead.load("en-de", device=wrong),
        "translate": lambda wrong: tr.translate(wrong),
        "generate": lambda wrong: gpt.generate(wrong, **short),
        "seed": lambda wrong: gpt.generate("a", seed=wrong, **short),
        "stop": lambda wrong: gpt.generate("a", stop=wrong, **short),
        "temperature": lambda wrong: gpt.generate("a", temperature=wrong, **short),
        "stream stop": lambda wrong: list(gpt.stream("a", stop=wrong, **short)),
        "alternatives": lambda wrong: gpt.alternatives(wrong, **short),
        "count": lambda wrong: gpt.alternatives("a", wrong, **short),
        "alternatives prefix": lambda wrong: tr.alternatives("a", prefix=wrong, **short),
        "chat system": lambda wrong: gpt.chat(system=wrong),
        "chat": lambda wrong: gpt.chat(wrong),
        "ask": lambda wrong: gpt.chat().ask(wrong),
        "prompt_ids": lambda wrong: gpt.prompt_ids(wrong),
        "fill": lambda wrong: lm.fill(wrong),
        "fill top": lambda wrong: lm.fill("a [MASK]", wrong),
        "classify": lambda wrong: labels.classify(wrong),
        "tag": lambda wrong: tags.tag(wrong),
        "answer": lambda wrong: span.answer(wrong, "cat"),
        "context": lambda wrong: span.answer("a", wrong),
        "answer top": lambda wrong: span.answer("a", "cat", top=wrong),
        "embed": lambda wrong: vectors.embed(wrong),
        "similar": lambda wrong: vectors.similar(wrong, ["a"]),
        "similar texts": lambda wrong: vectors.similar("a", wrong),
        "similar top": lambda wrong: vectors.similar("a", ["b"], top=wrong),
        "logits": lambda wrong: gpt.logits(wrong),
        "inspect": lambda wrong: gpt.inspect(wrong),
        "inspect top": lambda wrong: gpt.inspect("a", top=wrong),
        "inspect target": lambda wrong: tr.inspect("a", 5 if wrong is None else wrong),
        "save": lambda wrong: gpt.save(wrong),
        "export": lambda wrong: gpt.export(wrong),
        "export to": lambda wrong: gpt.export(folder / "out", to=wrong),
        "draft": lambda wrong: gpt.generate("a", draft=wrong or 0, **short),
        "prefix": lambda wrong: tr.translate("a", prefix=5 if wrong is None else wrong),
        "stream": lambda wrong: list(gpt.stream([None] if wrong == [5] else wrong, **short)),
    }


VALID = {  # of the values above, those that these accept
    "seed": (5,),
    "temperature": (5, 2.5),
    "count": (5,),
    "fill top": (5,),
    "answer top": (5,),
    "similar top": (5,),
    "inspect top": (5,),
    "tag": ([["a"]],),  # a list of words
}


def test_every_method_raises_its_own_error(methods: dict[str, Callable[[Any], Any]]) -> None:
    problems = []
    for name, method in methods.items():
        for wrong in WRONG:
            if any(type(wrong) is type(valid) and wrong == valid for valid in VALID.get(name, ())):
                continue
            try:
                result = method(wrong)
            except UserError:
                continue
            except Exception as error:
                result = error
            problems.append((name, wrong, repr(result)[:80]))
    assert not problems


def test_the_error_names_the_type(tmp_path: Path) -> None:
    model = load(make(tmp_path / "tr", "tiny-translator"), "cpu")
    with pytest.raises(UserError, match="translate: int is not a text; give a string, or a list of strings"):
        model.translate(5)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("ids", "target_ids", "message"),
    [
        ([[1.0, 2.0]], None, "ids: float32 is not a type of token ids; use int64"),
        ([[True]], None, "ids: bool is not a type"),
        ([1, 2], None, r"ids: shape \(2,\); give rows of at least one token"),
        ([[]], None, "ids: float32"),
        ([[-1]], None, "ids: token -1 is outside the vocabulary; give ids from 0 to"),
        ([[1 << 20]], None, "ids: token 1048576 is outside the vocabulary"),
        ([[1] * 9999], None, "ids: 9,999 tokens, but the model has .* positions; shorten the rows"),
        ([[1]], [[1]], "target_ids: .* is a decoder, which reads ids only; leave target_ids out"),
    ],
)
def test_ids_that_a_network_cannot_read(ids: Any, target_ids: Any, message: str, tmp_path: Path) -> None:
    model = load(make(tmp_path / "gpt", "tiny-gpt"), "cpu")
    with pytest.raises(UserError, match=message):
        model.logits(torch.tensor(ids), None if target_ids is None else torch.tensor(target_ids))
    assert torch.equal(model.logits(torch.tensor([[1, 2]])), model.logits(torch.tensor([[1, 2]], dtype=torch.uint8)))


def test_rows_of_ids_and_prefixes_that_are_not_equally_many(tmp_path: Path) -> None:
    model = load(make(tmp_path / "tr", "tiny-translator"), "cpu")
    with pytest.raises(UserError, match="target_ids: 1 rows, but ids have 2; give equally many"):
        model.logits(torch.tensor([[1], [2]]), torch.tensor([[1]]))
    with pytest.raises(UserError, match="target_ids: token 1048576 is outside the vocabulary"):
        model.logits(torch.tensor([[1]]), torch.tensor([[1 << 20]]))
    with pytest.raises(UserError, match="prefix: 2 texts, but 1 prefixes; give one for each, or none"):
        model.translate(["a", "b"], prefix=["x"])


def test_prompts_of_ids_outside_the_vocabulary(tmp_path: Path) -> None:
    model = load(make(tmp_path / "gpt", "tiny-gpt"), "cpu")
    with pytest.raises(UserError, match="prompt: token 99999999 is outside the vocabulary"):
        list(model.stream([99999999], max_new_tokens=2))
    with pytest.raises(UserError, match="prompt: no token ids; give at least one"):
        list(model.stream([], max_new_tokens=2))


def test_names_in_place_of_a_config_or_a_network() -> None:
    with pytest.raises(UserError, match=r"build: str is not a ModelConfig; get one with preset\('tiny-gpt'\)"):
        build("tiny-gpt")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="capture_attention: str is not a model"), capture_attention("x"):  # type: ignore[arg-type]
        pass
    build(preset("tiny-gpt", ["vocab_size=300"]), "meta")
