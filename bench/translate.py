"""Translation beside transformers and CTranslate2 on the same random weights, in one run: tokens a second and ratios.

    python -m bench.translate                 greedy and beam 4, transformer-base, 32 sentences of 24 tokens
    python -m bench.translate --runs 9        more of them, for a machine that others use too
    python -m bench.translate --sentences 128 --workers 2      batches of 32 side by side, a thread each

All take turns, each in a process of its own (within one, CTranslate2 and torch wait for each other's threads); a ratio
is the median of the ratios of each turn, so that a slow moment of the machine falls on all. Where others use it too,
two threads mostly wait for each other: --threads 1 and the ratio by CPU time then say more. Every sentence gets as
many tokens everywhere, and the texts are compared. The limit is what the matrix products alone would take at the
rate of one such product, measured in the same run.
"""

import argparse
import datetime
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import ctranslate2
import torch
import transformers
from ctranslate2.converters.transformers import MarianMTLoader
from torch import nn

from bench.sides import Side, timed
from bench.timing import machine
from clearhead.config import GenerationConfig
from clearhead.inference import optimize_for_inference, translate
from clearhead.inference.optimize import PackedLinear
from clearhead.model import build
from tests.model.peers import copy, from_hugging_face

WORDS, PADDING, END = 8000, 7999, 0
WIDTH, FF_WIDTH, LAYERS, BATCH = 512, 2048, 6, 32
Search = Callable[[], list[list[int]]]
ENGINES = (
    "clearhead float32",
    "clearhead int8",
    "transformers float32",
    "CTranslate2 float32",
    "CTranslate2 int8",
)
PAIRS = (  # which of the engines are compared
    ("clearhead float32", "transformers float32"),
    ("clearhead float32", "CTranslate2 float32"),
    ("clearhead int8", "CTranslate2 int8"),
    ("clearhead int8", "transformers float32"),
)


class Work(NamedTuple):
    """What is translated, and how."""

    sources: list[list[int]]
    beam: int
    tokens: int
    threads: int
    workers: int
    folder: str  # CTranslate2's


def main() -> None:
    """Parse the options, run every search, print the tables."""
    parser = argparse.ArgumentParser(prog="python -m bench.translate", description=__doc__.split("\n")[0])
    parser.add_argument("--sentences", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=24, help="of each source and each target")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1, help="batches of 32 at a time, 1 or more, a thread each")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--beams", default="1,4", help="separated by commas; 1 is greedy search")
    options = parser.parse_args()
    threads = options.threads if options.workers == 1 else 1
    torch.set_num_threads(threads)
    torch.manual_seed(1)
    sources = torch.randint(1, PADDING, (options.sentences, options.tokens)).tolist()
    print(f"{datetime.date.today()}  {machine(torch.device('cpu'))}")
    print(f"transformers {transformers.__version__}, CTranslate2 {ctranslate2.__version__}")
    ceilings = {kind: ceiling(kind, options.sentences * options.tokens) for kind in ("float32", "int8")}
    print("matrix products: " + ", ".join(f"{rate / 1e9:.0f} G/s in {kind}" for kind, rate in ceilings.items()))
    print(f"{LAYERS} + {LAYERS} layers of {WIDTH}, {WORDS} words; {options.sentences} × {options.tokens} tokens\n")
    with tempfile.TemporaryDirectory() as folder:
        convert(pair()[1], folder)
        for beam in map(int, options.beams.split(",")):
            work = Work(sources, beam, options.tokens, threads, options.workers, folder)
            with ExitStack() as stack:
                sides = {name: stack.enter_context(Side(search, name, work)) for name in ENGINES}
                compare(sides, beam, options.runs, options.sentences * options.tokens, ceilings)


def compare(sides: dict[str, Side], beam: int, runs: int, written: int, ceilings: dict[str, float]) -> None:
    """Let all take turns and print what came out."""
    texts = {name: side.run().result for name, side in sides.items()}
    turns = [{name: side.run() for name, side in sides.items()} for _ in range(runs)]
    print(f"{'greedy' if beam == 1 else f'beam {beam}':<22} {'tokens/s':>9} {'of the limit':>13} {'same texts':>11}")
    expected = texts["transformers float32"]
    for name in sides:
        rate = written / statistics.median(turn[name].clock for turn in turns)
        share = rate * operations(beam) / ceilings[name.split()[1]]
        same = sum(a == b for a, b in zip(texts[name], expected, strict=True))
        print(f"{name:<22} {rate:>9.0f} {share:>13.0%} {same:>7}/{len(expected)}")
    print(f"{'':<45} {'ratio':>6} {'by CPU time':>12}")
    for ours, theirs in PAIRS:
        clock = statistics.median(turn[theirs].clock / turn[ours].clock for turn in turns)
        cpu = statistics.median(turn[theirs].cpu / turn[ours].cpu for turn in turns)
        print(f"{ours:<17} to {theirs:<24} {clock:>6.2f} {cpu:>12.2f}")
    print(flush=True)


def operations(beam: int) -> float:
    """Multiplications and additions of the matrix products for each target token, with its share of the source."""
    square, wide, words = WIDTH * WIDTH, WIDTH * FF_WIDTH, WIDTH * WORDS
    source = LAYERS * (4 * square + 2 * wide) + LAYERS * 2 * square  # encoder, keys and values of the source
    return 2.0 * (source + beam * (LAYERS * (6 * square + 2 * wide) + words))


def ceiling(kind: str, rows: int) -> float:
    """Operations a second of one product of the model's shape, with weights laid out for it, at its best."""
    x = torch.randn(rows, WIDTH)
    numbers, weight = x.to(torch.int8), torch.ones(FF_WIDTH, WIDTH, dtype=torch.int8).t()
    packed = PackedLinear(nn.Linear(WIDTH, FF_WIDTH), torch.float32)
    with torch.inference_mode():
        works = [timed(lambda: torch._int_mm(numbers, weight) if kind == "int8" else packed(x)) for _ in range(50)]
    return 2 * rows * WIDTH * FF_WIDTH / min(turn.clock for turn in works)


def pair() -> tuple[Any, Any]:
    """Transformer-base with the same random weights, ours and theirs, scores spread as after training."""
    torch.manual_seed(0)
    config = transformers.MarianConfig(
        vocab_size=WORDS,
        d_model=WIDTH,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=FF_WIDTH,
        decoder_ffn_dim=FF_WIDTH,
        max_position_embeddings=512,
        activation_function="relu",
        scale_embedding=True,
        dropout=0.0,
        pad_token_id=PADDING,
        decoder_start_token_id=PADDING,
        eos_token_id=END,
        forced_eos_token_id=None,
        attn_implementation="sdpa",
    )
    peer = transformers.MarianMTModel(config).eval()
    with torch.no_grad():
        peer.model.decoder.layers[-1].final_layer_norm.weight.mul_(6.0)
    ours, table = from_hugging_face(peer)
    network = build(ours).eval()
    copy(network, peer, table)
    return network, peer


def convert(peer: Any, folder: str) -> None:
    """The peer's weights as CTranslate2 reads them; its words are w0, w1 …, without the padding, which it has not."""
    spec = MarianMTLoader().get_model_spec(peer)
    words = [f"w{number}" for number in range(PADDING)]
    spec.register_source_vocabulary(words)
    spec.register_target_vocabulary(words)
    spec.config.eos_token = spec.config.decoder_start_token = words[END]
    spec.config.unk_token = words[1]
    spec.validate()
    spec.optimize()
    spec.save(folder)


def search(name: str, work: Work) -> Search:
    """One engine's search, which gives the best text of every source."""
    torch.set_num_threads(work.threads)
    transformers.logging.set_verbosity_error()
    library, kind = name.split()
    if library == "CTranslate2":
        return third(kind, work)
    network, peer = pair()
    return ours(network, getattr(torch, kind), work) if library == "clearhead" else theirs(peer, work)


def ours(network: Any, kind: torch.dtype, work: Work) -> Search:
    """As `Model.translate`."""
    reader, tokens = optimize_for_inference(network, kind), work.tokens
    config = GenerationConfig(
        beam=work.beam,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        banned_ids=((PADDING,),),
        batch_size=BATCH,
        workers=work.workers,
    )
    return lambda: [found[0].ids for found in translate(reader, work.sources, config, begin=PADDING, end=END)]


def theirs(peer: Any, work: Work) -> Search:
    """transformers' generate."""
    ids, tokens = torch.tensor(work.sources), work.tokens
    options = {"num_beams": work.beam, "do_sample": False, "min_new_tokens": tokens, "max_new_tokens": tokens}

    def run() -> list[list[int]]:
        found: list[list[int]] = []
        for batch in ids.split(BATCH):
            texts = peer.generate(
                input_ids=batch, attention_mask=torch.ones_like(batch), bad_words_ids=[[PADDING]], **options
            )
            found += texts[:, 1:].tolist()
        return found

    return run


def third(kind: str, work: Work) -> Search:
    """CTranslate2's translate_batch."""
    words = [[f"w{number}" for number in row] for row in work.sources]
    translator = ctranslate2.Translator(
        work.folder, compute_type=kind, inter_threads=work.workers, intra_threads=work.threads
    )
    options = {"beam_size": work.beam, "min_decoding_length": work.tokens, "max_decoding_length": work.tokens}

    def run() -> list[list[int]]:
        found = translator.translate_batch(words, max_batch_size=BATCH, **options)
        return [[int(word[1:]) for word in each.hypotheses[0]] for each in found]

    return run


if __name__ == "__main__":
    main()
