"""How much of a split by source is in the training data, and what that adds to the scores of the packaged translators.

    python -m bench.overlap                       en-de, de-en and zh-en
    python -m bench.overlap de-en --beam 1        one model, greedy search

Three sets of pairs: all those that the training data leave out; of these, those whose target is not a target of the
training data; and those without a near-duplicate in the training data, which are the pairs that `clearhead evaluate`
and the model cards use. For German and English also Multi30k, captions of images, none of which were trained on.
"""

import argparse
import datetime
from collections.abc import Sequence
from itertools import chain

import torch

from bench.timing import machine
from clearhead.config.data import Corpus, DataConfig
from clearhead.data.build_datasets import raw_records
from clearhead.data.formats import TRANSLATION
from clearhead.data.held_out import is_split_off
from clearhead.evaluate.bleu import bleu, chrf
from clearhead.evaluate.model import pairs
from clearhead.predict import load

Pair = tuple[str, str]
MODELS = ("en-de", "de-en", "zh-en")


def main() -> None:
    """Parse the options, translate each set once, print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.overlap", description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--beam", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{datetime.date.today()}  {machine(torch.device('cpu'))}; beam {options.beam}")
    print(f"{'model':<8} {'pairs':<38} {'number':>7} {'BLEU':>6} {'chrF':>6} {'exact':>6}")
    for name in options.models:
        model = load(name, device="cpu")
        assert model.data is not None
        sets = pair_sets(model.data)
        if {"en", "de"} == {*name.split("-")}:
            sets["Multi30k test_2016_flickr"] = multi30k(*name.split("-"))
        sources = list(dict.fromkeys(source for chosen in sets.values() for source, _ in chosen))
        results = model.translate(sources, beam=options.beam)
        outputs = {source: result.text for source, result in zip(sources, results, strict=True)}
        for title, chosen in sets.items():
            texts, references = [outputs[source] for source, _ in chosen], [target for _, target in chosen]
            scores = [bleu(texts, references), chrf(texts, references)]
            exact = sum(a == b for a, b in zip(texts, references, strict=True)) / len(texts)
            values = " ".join(f"{score.value:>6.2f}" for score in scores)
            print(f"{name:<8} {title:<38} {len(chosen):>7,} {values} {exact:>6.3f}")
    print(*(score.signature for score in scores), sep="\n")


def pair_sets(data: DataConfig) -> dict[str, Sequence[Pair]]:
    """Return the pairs split off by source, those with a new target, and those without a near-duplicate."""
    records = list(chain.from_iterable(raw_records(each, TRANSLATION, data.source_url) for each in data.train))
    training = {record.values[1] for record in records if not is_split_off(record, data)}
    split_off = [record.values for record in records if is_split_off(record, data)]
    new_target = [pair for pair in split_off if pair[1] not in training]
    known = 1 - len(new_target) / len(split_off)
    return {
        "split off by source": split_off,
        f"target not in training ({known:.1%} are)": new_target,
        "no near-duplicate in training": list(zip(*pairs(data), strict=True)),
    }


def multi30k(source: str, target: str) -> list[Pair]:
    """Return the pairs of the test set of 2016."""
    files = [f"multi30k/test_2016_flickr.{language}.gz" for language in (source, target)]
    corpus = Corpus.build({"format": "parallel", "files": files})
    return [record.values for record in raw_records(corpus, TRANSLATION)]  # type: ignore[misc]


if __name__ == "__main__":
    main()
