"""Translation of real sentences against CTranslate2 on the same weights: sentences/s, BLEU and ratios.

    python -m bench.sentences                     en-de, on the held-out Tatoeba sentences
    python -m bench.sentences zh-en --beam 1      another model, greedy search
    python -m bench.sentences --limit 500         the first 500 sentences

Times are from text to text, tokenization included; each engine sorts and batches as it does by default. The engines
take turns, each in its own process; a ratio is the median of each turn's ratios.
"""

import argparse
import datetime
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import ctranslate2
import torch

from bench.sides import Side, Turn
from bench.timing import machine
from clearhead.checkpoint import load_model
from clearhead.checkpoint.formats import export_model
from clearhead.evaluate.bleu import bleu
from clearhead.evaluate.model import pairs
from clearhead.predict import load
from clearhead.predict.find import find_model

Translate = Callable[[], list[str]]
ENGINES = ("clearhead float32", "clearhead int8", "CTranslate2 float32", "CTranslate2 int8")


def main() -> None:
    """Parse the options, let the engines take turns, print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.sentences", description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default="en-de")
    parser.add_argument("--beam", type=int, default=4)
    parser.add_argument("--limit", type=int, default=10**6, help="number of sentences")
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
        args = (options.model, sources, options.beam, options.threads, str(Path(folder) / "out"))
        turns: dict[str, list[Turn]] = {name: [] for name in ENGINES}
        with ExitStack() as stack:
            sides = {name: stack.enter_context(Side(engine, name, *args)) for name in ENGINES}
            for number in range(options.runs + 1):
                for name, side in sides.items():
                    turn = side.run()
                    if number:  # the first turn is a warm-up
                        turns[name].append(turn)
    print(f"{'':<20} {'sentences/s':>12} {'BLEU':>6} {'equal texts':>12}   ratio at the same precision")
    for name in ENGINES:
        translations = turns[name][-1].result
        score = bleu(translations, references)
        equal = sum(a == b for a, b in zip(translations, turns[ENGINES[0]][-1].result, strict=True))
        peers = turns[name.replace("clearhead", "CTranslate2")]
        ratio = statistics.median(b.clock / a.clock for a, b in zip(turns[name], peers, strict=True))
        shown = f"{ratio:.2f}x" if name.startswith("clearhead") else ""
        speed = len(sources) / statistics.median(turn.clock for turn in turns[name])
        print(f"{name:<20} {speed:>12.1f} {score.value:>6.2f} {equal:>7}/{len(sources)}   {shown}")
    print(score.signature)


def engine(name: str, model: str, sources: list[str], beam: int, threads: int, folder: str) -> Translate:
    """Return a function that translates all sources with Clearhead, or with CTranslate2 and our tokenizers."""
    torch.set_num_threads(threads)
    library, dtype = name.split()
    ours = load(model, device="cpu", dtype=dtype)
    if library == "clearhead":
        return lambda: [each.text for each in ours.translate(sources, beam=beam)]
    # One thread per batch, as ours does by default: faster than all threads on one batch.
    translator = ctranslate2.Translator(folder, compute_type=dtype, inter_threads=threads, intra_threads=1)
    source, target = ours.tokenizers[0], ours.tokenizers[-1]

    def translate() -> list[str]:
        tokens = [[source.id_to_token(number) for number in source.encode(text)] for text in sources]
        results = translator.translate_batch(tokens, beam_size=beam, max_batch_size=2048, batch_type="tokens")
        return [target.decode([target.vocabulary[token] for token in result.hypotheses[0]]) for result in results]

    return translate


if __name__ == "__main__":
    main()
