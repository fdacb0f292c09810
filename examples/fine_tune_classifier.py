"""Fine-tune the packaged BERT on a TSV file of texts and labels, then evaluate and use it."""

import itertools
import tempfile
from pathlib import Path

import clearhead

NOUNS = ("story", "dinner", "garden", "journey", "concert", "letter", "house", "morning", "play", "book")
ADJECTIVES = {"good": ("lovely", "delightful", "charming", "splendid"), "bad": ("dreadful", "dull", "awful", "dreary")}


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    pairs = [(word, label) for label, words in ADJECTIVES.items() for word in words]
    lines = [f"The {noun} was {word}.\t{label}\n" for noun, (word, label) in itertools.product(NOUNS, pairs)]
    (folder / "train.tsv").write_text("".join(lines[:-16]), encoding="utf-8")
    (folder / "test.tsv").write_text("".join(lines[-16:]), encoding="utf-8")
    files = {"format": "tsv", "files": [str(folder / "train.tsv")], "columns": {"text": 1, "label": 2}}
    result = clearhead.train(
        {
            "model": {"init_from": "novels-bert"},
            "data": {"task": "classification", "train": files, "max_length": 32, "batch_tokens": 256},
            "train": {"steps": 15, "lr": 5e-4, "warmup": 3},
        },
        out=folder / "run",
        log=print,
        on_event=lambda event: print(f"step {event['step']}: loss {event['loss']:.3f}") if "loss" in event else None,
        train__log_every=5,
    )
    model = result.load()
    print(clearhead.evaluate(model, folder / "test.tsv"))
    print(model.classify(["What a charming evening!", "It was an awful morning."]))


if __name__ == "__main__":
    main()
