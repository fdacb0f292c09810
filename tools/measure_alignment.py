"""Choose the alignment heads of translators and write them, with the error rate, into their folders and cards.

    python -m tools.measure_alignment src/clearhead/models/en-de en-de

Heads are chosen on validation sentences of the embedded grammar and scored on its test sentences. The tensors and the
tokenizers are copied as they are.
"""

import argparse
import shutil
from pathlib import Path
from typing import Any

from clearhead.checkpoint import Score, disk
from clearhead.checkpoint.card import replace_score
from clearhead.checkpoint.model_folder import CARD, CONFIG
from clearhead.evaluate.alignment import GRAMMAR, choose_heads, collect_attention, evaluate_alignment
from clearhead.evaluate.word_links import grammar_pairs
from clearhead.files import read_text
from clearhead.predict import Model, load

METRIC = "alignment error rate"
SENTENCES = 400


def measure(model: Model, languages: str) -> tuple[dict[str, Any], Score]:
    """Return `alignment` for config.json, and the score for the card."""
    source, _, target = languages.partition("-")
    pairs = grammar_pairs((source, target), 3, "valid", SENTENCES)  # type: ignore[arg-type]
    heads = [list(head) for head in choose_heads(collect_attention(model, pairs))]
    chosen = Model(model.network, model.own_tokenizers, model.extra | {"alignment": {"heads": heads}}, model.name)
    rate = evaluate_alignment(chosen, languages)["alignment_error_rate"]
    command = f"clearhead evaluate {model.name} --alignment {languages}"
    settings = {"heads": heads, "error_rate": round(rate, 4), "measured_on": f"{GRAMMAR}, level 3, {languages}"}
    return settings, Score(METRIC, rate, "test sentences of the embedded grammar", command)


def main() -> None:
    """Measure one folder and rewrite its config.json and README.md."""
    parser = argparse.ArgumentParser(prog="python -m tools.measure_alignment", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="a model folder")
    parser.add_argument("languages", help="two of en, de and zh, like en-de")
    options = parser.parse_args()
    folder: Path = options.folder
    loaded = load(folder)
    model = Model(loaded.network, loaded.own_tokenizers, loaded.extra, folder.name)
    settings, score = measure(model, options.languages)
    names, card = disk.verify(folder), read_text(folder / CARD)
    config = disk.read_json(folder / CONFIG) | {"alignment": settings}
    with disk.atomic_folder(folder) as temporary:
        for name in sorted(names - {CONFIG, CARD}):
            shutil.copyfile(folder / name, temporary / name)
        disk.write_json(temporary / CONFIG, config)
        disk.write_text(temporary / CARD, replace_score(card, score))
    print(f"{folder}: {METRIC} {score.value:.4g} with heads {settings['heads']}")


if __name__ == "__main__":
    main()
