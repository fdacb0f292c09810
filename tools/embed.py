"""Make a model of the package out of a run: stored in bytes, scored as stored, with its card.

    clearhead train tatoeba-en-de --out runs/tatoeba-en-de
    python -m tools.embed runs/tatoeba-en-de en-de

The scores in the card are those of the stored folder, by `clearhead evaluate` on data that was held out.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch

from clearhead.checkpoint import load_model, save_model
from clearhead.checkpoint.card import Score, model_card
from clearhead.config.recipe import recipe_text
from clearhead.evaluate.model import evaluate
from clearhead.predict import load

MODELS = Path(__file__).parents[1] / "src" / "clearhead" / "models"
MOST = 6_000_000  # bytes of one model
TATOEBA = (
    "Sentence pairs of Tatoeba (tatoeba.org) as selected by manythings.org/anki, by many contributors, CC BY 2.0; "
    "cut into pieces and learned from, not reproduced."
)


@dataclass(frozen=True)
class Plan:
    """What a card says that no run knows."""

    recipe: str
    summary: str
    data: tuple[str, ...]
    license: str
    use: str


PLANS = {
    "en-de": Plan(
        "tatoeba-en-de",
        "Translates English everyday sentences to German. Small: no replacement for a large translator on long texts.",
        (TATOEBA, "2% of the English sentences were held out, for the scores."),
        "Apache-2.0 for the weights; the data is CC BY 2.0.",
        'echo "Two dogs are playing in the snow." | clearhead translate en-de',
    ),
    "de-en": Plan(
        "tatoeba-de-en",
        "Translates German everyday sentences to English. Small: no replacement for a large translator on long texts.",
        (TATOEBA, "2% of the German sentences were held out, for the scores."),
        "Apache-2.0 for the weights; the data is CC BY 2.0.",
        'echo "Zwei Hunde spielen im Schnee." | clearhead translate de-en',
    ),
    "zh-en": Plan(
        "tatoeba-zh-en",
        "Translates Chinese everyday sentences to English. Learned from only 28,000 pairs: simple sentences work, "
        "others often do not.",
        (TATOEBA, "29,155 pairs, simplified and traditional mixed; 3% of the Chinese sentences were held out."),
        "Apache-2.0 for the weights; the data is CC BY 2.0 France.",
        'echo "火车站在哪里？" | clearhead translate zh-en',
    ),
    "novels-gpt": Plan(
        "novels-llama",
        "Goes on in the manner of English novels of 1839 to 1930; the block of 2024 (RMSNorm, grouped queries, rotary "
        "positions, SwiGLU). It has style, and no plot.",
        ("49 English novels of 1839 to 1930 (github.com/computationalstylistics/100_english_novels), 39 MB of text.",),
        "Apache-2.0 for the weights; the novels are old.",
        'clearhead generate novels-gpt "It was a dark evening in October when" --seed 3',
    ),
    "novels-bert": Plan(
        "novels-bert",
        "A small BERT, pretrained on novels and Wikipedia: masked words and next sentences. Made for fine-tuning.",
        (
            "49 English novels of 1839 to 1930 (github.com/computationalstylistics/100_english_novels).",
            "WikiText-2 (Wikipedia, CC BY-SA), valid and test parts left out of training.",
        ),
        "Apache-2.0 for the weights; see the data for its own licenses.",
        'clearhead fill novels-bert "She opened the [MASK] and looked out."',
    ),
}


def main() -> None:
    """Store, score, write the card."""
    parser = argparse.ArgumentParser(prog="python -m tools.embed", description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, help="a run folder, or a model folder")
    parser.add_argument("name", choices=sorted(PLANS))
    parser.add_argument("--out", type=Path, default=MODELS, help="folder of the models")
    options = parser.parse_args()
    plan, folder = PLANS[options.name], options.out / options.name
    source = options.run / "last" if (options.run / "last").is_dir() else options.run
    loaded = load_model(source)
    save_model(folder, loaded.network, loaded.tokenizers, loaded.extra, dtype=torch.int8)
    found = evaluate(load(folder), say=print)
    scores = [
        Score(name, value, "held-out data", str(found.get(f"{name}_signature", "")))
        for name, value in found.items()
        if isinstance(value, float)
    ]
    data = [*plan.data, f"Trained for {loaded.extra.get('step', '?')} steps on one NVIDIA H200."]
    text = f"# clearhead train {plan.recipe}\n{recipe_text(plan.recipe)}"
    card = model_card(options.name, plan.summary, data, text, scores, plan.license, plan.use)
    save_model(folder, loaded.network, loaded.tokenizers, loaded.extra, card, dtype=torch.int8)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder}: {size:,} bytes; " + ", ".join(f"{each.metric} {each.value:.4g}" for each in scores))
    if size > MOST:
        raise SystemExit(f"{size:,} bytes are more than {MOST:,}; make the model smaller")


if __name__ == "__main__":
    main()
