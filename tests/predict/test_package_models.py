"""The models that come with the package: they answer, and bytes do not cost quality."""

import pytest

from clearhead.evaluate.model import evaluate
from clearhead.predict import load
from tests.corpora import corpus


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("en-de", "Two dogs are playing in the snow.", "Zwei Hunde spielen im Schnee."),
        ("de-en", "Wo ist der Bahnhof?", "Where is the station?"),
        ("zh-en", "我爱你。", "I love you."),
    ],
)
def test_translators_translate(name: str, text: str, expected: str) -> None:
    assert load(name, device="cpu").translate([text]) == [expected]
    assert load(name, device="cpu", dtype="int8").translate([text]) == [expected]


def test_the_novelist_goes_on_in_whole_words() -> None:
    [[found]] = load("novels-gpt", device="cpu").generate(["It was a dark evening in October when"], max_new_tokens=30)
    assert len(found.text.split()) >= 15
    assert "�" not in found.text


def test_masked_words_are_words_that_fit() -> None:
    [[gap]] = load("novels-bert", device="cpu").fill(["She looked out of the [MASK] at the garden."], top=5)
    assert "window" in [word.text for word in gap.words]


@pytest.mark.parametrize("name", ["zh-en"])
def test_integer_products_cost_little(name: str) -> None:
    corpus("tatoeba_en_zh")
    scores = [evaluate(load(name, device="cpu", dtype=dtype), beam=1)["bleu"] for dtype in ("float32", "int8")]
    assert abs(scores[0] - scores[1]) <= 0.3
