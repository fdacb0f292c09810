"""Make a packaged model from a run: int8 weights, evaluated as stored, with a model card.

    clearhead train tatoeba-en-de --out runs/tatoeba-en-de
    python -m tools.package_model runs/tatoeba-en-de en-de

The scores in the card are those of the stored folder, by `clearhead evaluate` on held-out data. To write only its card
again, give the packaged model in place of the run.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from clearhead.checkpoint import load_model, save_model
from clearhead.checkpoint.card import Score, model_card
from clearhead.config.data import Corpus
from clearhead.config.recipe import recipe_text
from clearhead.evaluate.model import evaluate
from clearhead.predict import Model, load
from tools.measure_alignment import measure

MODELS = Path(__file__).parents[1] / "src" / "clearhead" / "models"
TRANSLATORS = ("en-de", "de-en", "zh-en")  # named after their languages
MAX_BYTES = 6_000_000  # of one model
TATOEBA = (
    "Sentence pairs of Tatoeba (tatoeba.org) as selected by manythings.org/anki, by many contributors, CC BY 2.0; "
    "used for training, not reproduced."
)
NEAR = (
    "were split off; scores are on those of their pairs whose source and target have no near-duplicate in the training "
    "data (same words, or all but one of four or more)."
)
LARGER = "\n\nFor anything else, use a large translator such as those of OPUS-MT (github.com/Helsinki-NLP/Opus-MT)."
NOVELS = "49 English novels of 1839 to 1930 (github.com/computationalstylistics/100_english_novels)"


@dataclass(frozen=True)
class CardText:
    """The parts of a model card that are not stored in a run."""

    recipe: str
    summary: str
    data: tuple[str, ...]
    license: str
    use: str
    captions: tuple[str, ...] = ()  # languages of image captions to translate, which differ from the training data


CARDS = {
    "en-de": CardText(
        "tatoeba-en-de",
        f"Translates short everyday sentences from English to German; not for news, technical or long text.{LARGER}",
        (TATOEBA, f"2% of the English sentences {NEAR}"),
        "Apache-2.0 for the weights; the data is CC BY 2.0.",
        'echo "Two dogs are playing in the snow." | clearhead translate en-de',
        ("en", "de"),
    ),
    "de-en": CardText(
        "tatoeba-de-en",
        f"Translates short everyday sentences from German to English; not for news, technical or long text.{LARGER}",
        (TATOEBA, f"2% of the German sentences {NEAR}"),
        "Apache-2.0 for the weights; the data is CC BY 2.0.",
        'echo "Zwei Hunde spielen im Schnee." | clearhead translate de-en',
        ("de", "en"),
    ),
    "zh-en": CardText(
        "tatoeba-zh-en",
        "Translates very short everyday sentences from Chinese to English; trained on only 28,000 pairs, it often "
        f"fails on others.{LARGER}",
        (TATOEBA, "29,155 pairs, simplified and traditional mixed.", f"3% of the Chinese sentences {NEAR}"),
        "Apache-2.0 for the weights; the data is CC BY 2.0 France.",
        'echo "火车站在哪里？" | clearhead translate zh-en',
    ),
    "novels-gpt": CardText(
        "novels-llama",
        "Continues text in the style of English novels of 1839 to 1930, with a Llama-style decoder (RMSNorm, "
        "grouped-query attention, rotary positions, SwiGLU). It has style, but no plot.",
        (f"{NOVELS}, 39 MB of text.",),
        "Apache-2.0 for the weights; the novels were published from 1839 to 1930.",
        'clearhead generate novels-gpt "It was a dark evening in October when" --seed 3',
    ),
    "novels-bert": CardText(
        "novels-bert",
        "A small BERT, pretrained on novels and Wikipedia with masked tokens and next sentences. Made for fine-tuning.",
        (f"{NOVELS}.", "WikiText-2 (Wikipedia, CC BY-SA); its valid and test splits were not used for training."),
        "Apache-2.0 for the weights; see the data for its own licenses.",
        'clearhead fill novels-bert "She opened the [MASK] and looked out."',
    ),
}


def card_of(name: str, recipe: str, steps: Any, scores: Sequence[Score]) -> str:
    """Return the model card of a packaged model; `recipe` is YAML."""
    text = CARDS[name]
    data = [*text.data, f"Trained for {steps} steps on one NVIDIA H200."]
    recipe = f"# clearhead train {text.recipe}\n{recipe}"
    return model_card(name, text.summary, data, recipe, scores, text.license, text.use)


def scores_of(folder: Path, captions: Sequence[str] = ()) -> list[Score]:
    """Return the scores of a model on its held-out data and, for a translator, on captions of Multi30k."""
    model = load(folder)
    results = evaluate(model, log=print)
    scores = _as_scores(results, f"{results['texts']:,} held-out pairs" if "texts" in results else "held-out data")
    if captions:
        files = [f"multi30k/test_2016_flickr.{language}.gz" for language in captions]
        results = evaluate(model, [Corpus.build({"format": "parallel", "files": files})], log=print)
        scores += _as_scores(results, f"{results['texts']:,} image captions (Multi30k, test_2016_flickr)")
    return scores


def _as_scores(results: dict[str, Any], data: str) -> list[Score]:
    return [
        Score(name, value, data, str(results.get(f"{name}_signature", "")))
        for name, value in results.items()
        if isinstance(value, float)
    ]


def main() -> None:
    """Store the model, evaluate it and write its card."""
    parser = argparse.ArgumentParser(prog="python -m tools.package_model", description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, help="a run folder, or a model folder")
    parser.add_argument("name", choices=sorted(CARDS))
    parser.add_argument("--out", type=Path, default=MODELS, help="folder of the packaged models")
    options = parser.parse_args()
    folder = options.out / options.name
    source = options.run / "last" if (options.run / "last").is_dir() else options.run
    loaded = load_model(source)
    save_model(folder, loaded.network, loaded.tokenizers, loaded.extra, dtype=torch.int8)
    extra, scores = loaded.extra, scores_of(folder, CARDS[options.name].captions)
    if options.name in TRANSLATORS:
        stored = load(folder)
        model = Model(stored.network, stored.own_tokenizers, stored.extra, options.name)
        settings, score = measure(model, options.name)
        extra, scores = extra | {"alignment": settings}, [*scores, score]
    card = card_of(options.name, recipe_text(CARDS[options.name].recipe), loaded.extra.get("step", "?"), scores)
    save_model(folder, loaded.network, loaded.tokenizers, extra, card, dtype=torch.int8)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder}: {size:,} bytes; " + ", ".join(f"{each.metric} {each.value:.4g}" for each in scores))
    if size > MAX_BYTES:
        raise SystemExit(f"{folder}: {size:,} bytes, more than {MAX_BYTES:,}; make the model smaller")


if __name__ == "__main__":
    main()
