"""Model cards: written as valid Markdown, and parsed again."""

import time

from clearhead.checkpoint import Card, Score, model_card, read_card


def test_a_card_states_data_recipe_scores_and_license() -> None:
    text = model_card(
        "en-de",
        "Translates English into German.",
        ["Multi30k: 29,000 pairs"],
        "train:\n  steps: 100\n  note: ```",
        [Score("BLEU", 34.5678, "test|2016", "nrefs:1|case:mixed")],
        "Apache-2.0",
        "clearhead translate en-de",
    )
    assert "| BLEU | 34.57 | test\\|2016 | nrefs:1\\|case:mixed |" in text
    assert "````yaml\ntrain:\n  steps: 100\n  note: ```\n````" in text
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        "# en-de", "## Use", "## Data", "## Scores", "## Recipe", "## License",
    ]  # fmt: skip
    assert "Not measured." in model_card("x", "y", [], "a: 1", [], "")


def test_reading_a_card_restores_its_fields() -> None:
    scores = [Score("BLEU", 34.57, "test|2016", "nrefs:1|case:mixed"), Score("loss", 1e-05, "validation data", "")]
    recipe = "train:\n  steps: 100\n  note: '## no heading, ```'\n"
    text = model_card(
        "en-de", "Translates.\n\nWell.", ["Multi30k", "own texts"], recipe, scores, "CC BY 4.0", "clearhead"
    )
    expected = Card("Translates.\n\nWell.", ("Multi30k", "own texts"), tuple(scores), recipe, "CC BY 4.0")
    assert read_card(text) == expected
    assert read_card(model_card("x", "y", [], "a: 1", [], "")) == Card("y", (), (), "a: 1\n", "Not stated.")


def test_cards_of_another_form_are_read_as_far_as_possible() -> None:
    assert read_card("") == Card()
    assert read_card("just a note") == Card("just a note")
    assert read_card("# Title\n\n## Scores\n| a | b |\n| BLEU | ? | x | y |\n## Recipe\nnone") == Card()


def test_cards_of_version_1_are_read() -> None:
    text = model_card("x", "y", [], "a: 1", [], "MIT").replace("## License", "## Licence")
    assert read_card(text).license == "MIT"


def test_reading_a_card_takes_time_linear_in_its_size() -> None:
    for part in ("```yaml\n", "````yaml\n```\n", "## ", "|", "\\|", "# ", "- ", "\n", "| a | 1 | b | c |\n"):
        text = "## Recipe\n" + part * (1_000_000 // len(part))
        start = time.process_time()
        read_card(text)
        read_card(text.replace("Recipe", "Scores"))
        assert time.process_time() - start < 4, part
