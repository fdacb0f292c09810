"""Real sentences through a translator of the package, beside CTranslate2 on the same weights: speed and quality.

    python -m bench.sentences                     en-de, the sentences of Tatoeba that were held out from its training
    python -m bench.sentences zh-en --beam 1      another model, greedy
    python -m bench.sentences --limit 500         only the first of them

Texts go in and texts come out, tokenizers included; each engine sorts and batches as it likes. All take turns, and a
ratio is the median of the ratios of each turn.
"""

import argparse
import datetime
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import ctranslate2
import torch

from bench.timing import machine
from clearhead.checkpoint import load_model
from clearhead.checkpoint.foreign import export_model
from clearhead.evaluate.model import pairs
from clearhead.evaluate.translation import bleu
from clearhead.predict import Model, load
from clearhead.predict.find import find_model

Translate = Callable[[list[str]], list[str]]


def main() -> None:
    """Parse the options, let the engines take turns, print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.sentences", description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default="en-de")
    parser.add_argument("--beam", type=int, default=4)
    parser.add_argument("--limit", type=int, default=10**6, help="of sentences")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = load(options.model, device="cpu")
    assert model.data is not None
    sources, references = (side[: options.limit] for side in pairs(model.data, model.data.test))
    print(f"{datetime.date.today()}  {machine(torch.device('cpu'))}, CTranslate2 {ctranslate2.__version__}")
    print(f"{options.model}, {len(sources):,} sentences, beam {options.beam}, {options.threads} threads")
    with tempfile.TemporaryDirectory() as folder:
        export_model(load_model(find_model(options.model)), Path(folder) / "out", "ctranslate2")
        engines = {
            "clearhead float32": ours(model, options.beam),
            "clearhead int8": ours(load(options.model, device="cpu", dtype="int8"), options.beam),
            "CTranslate2 float32": theirs(model, Path(folder) / "out", "float32", options.beam, options.threads),
            "CTranslate2 int8": theirs(model, Path(folder) / "out", "int8", options.beam, options.threads),
        }
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        texts: dict[str, list[str]] = {}
        for _ in range(options.runs):
            for name, translate in engines.items():
                begun = time.perf_counter()
                texts[name] = translate(sources)
                seconds[name].append(time.perf_counter() - begun)
    print(f"{'':<20} {'sentences/s':>12} {'bleu':>6} {'same texts':>11}   ratio at the same precision")
    for name in engines:
        score = bleu(texts[name], references)
        same = sum(a == b for a, b in zip(texts[name], texts["clearhead float32"], strict=True))
        peer = seconds[name.replace("clearhead", "CTranslate2")]
        ratio = statistics.median(b / a for a, b in zip(seconds[name], peer, strict=True))
        shown = f"{ratio:.2f}x" if name.startswith("clearhead") else ""
        rate = len(sources) / statistics.median(seconds[name])
        print(f"{name:<20} {rate:>12.1f} {score.value:>6.2f} {same:>6}/{len(sources)}   {shown}")
    print(score.signature)


def ours(model: Model, beam: int) -> Translate:
    """As `clearhead translate`."""
    return lambda texts: model.translate(texts, beam=beam)


def theirs(model: Model, folder: Path, kind: str, beam: int, threads: int) -> Translate:
    """CTranslate2 between our tokenizers."""
    translator = ctranslate2.Translator(str(folder), compute_type=kind, intra_threads=threads)
    source, target = model.tokenizers[0], model.tokenizers[-1]

    def translate(texts: list[str]) -> list[str]:
        tokens = [[source.token(number) for number in source.encode(text)] for text in texts]
        found = translator.translate_batch(tokens, beam_size=beam, max_batch_size=2048, batch_type="tokens")
        return [target.decode([target.vocabulary[token] for token in each.hypotheses[0]]) for each in found]

    return translate


if __name__ == "__main__":
    main()
