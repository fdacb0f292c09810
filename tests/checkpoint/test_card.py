"""Model cards: everything a reader needs, in Markdown that renders."""

from clearhead.checkpoint import Score, model_card


def test_a_card_states_data_recipe_scores_and_licence() -> None:
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
        "# en-de", "## Use", "## Data", "## Scores", "## Recipe", "## Licence",
    ]  # fmt: skip
    assert "Not measured." in model_card("x", "y", [], "a: 1", [], "")
