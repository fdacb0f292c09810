"""The packaged models: they give sensible results, and int8 costs little quality."""

import pytest

from clearhead.checkpoint import model_folder_info
from clearhead.evaluate.model import evaluate
from clearhead.predict import find_model, load
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
    assert load(name, device="cpu").translate(text).text == expected
    assert load(name, device="cpu", dtype="int8").translate(text).text == expected


def test_the_language_model_generates_whole_words() -> None:
    result = load("novels-gpt", device="cpu").generate("It was a dark evening in October when", max_new_tokens=30)
    assert len(result.text.split()) >= 15
    assert "�" not in result.text


def test_masks_are_filled_with_tokens_that_fit() -> None:
    filled = load("novels-bert", device="cpu").fill("She looked out of the [MASK] at the garden.", top=5)
    [mask] = filled.masks
    assert "window" in [token.text for token in mask.tokens]
    assert str(filled) == f"She looked out of the {mask.tokens[0].text} at the garden."


def test_a_card_states_the_scores_on_the_held_out_pairs() -> None:
    corpus("tatoeba_en_zh")
    result = evaluate(load("zh-en", device="cpu"))
    score = model_folder_info(find_model("zh-en")).card.scores[0]
    assert (score.metric, score.data) == ("bleu", f"{result['texts']:,} held-out pairs")
    assert score.value == pytest.approx(result["bleu"], abs=0.3)
    assert score.signature.partition("|version")[0] == result["bleu_signature"].partition("|version")[0]


@pytest.mark.parametrize("name", ["zh-en"])
def test_int8_costs_little_bleu(name: str) -> None:
    corpus("tatoeba_en_zh")
    scores = [evaluate(load(name, device="cpu", dtype=dtype), beam=1)["bleu"] for dtype in ("fp32", "int8")]
    assert abs(scores[0] - scores[1]) <= 0.5  # 0.37 on these 560 pairs, 0.17 on all 851 split off
