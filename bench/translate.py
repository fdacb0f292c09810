"""Translation speed against transformers and CTranslate2 on the same random weights: tokens/s and ratios.

    python -m bench.translate                 greedy and beam 4, transformer-base, 32 sentences of 24 tokens
    python -m bench.translate --runs 9        more turns, for a shared machine
    python -m bench.translate --sentences 128 --workers 2      concurrent batches of 32, one thread each

The engines take turns, each in its own process (in one process, CTranslate2 and torch wait for each other's threads); a
ratio is the median of each turn's ratios. On a shared machine use --threads 1 and the CPU time ratio. Every engine
generates the same number of tokens, and their outputs are compared. `of limit` is relative to the time of the matmuls
alone at the speed of a single matmul measured in the same run.
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
from clearhead.inference import pack_for_steps, translate
from clearhead.model import build
from clearhead.ops.linear.packed import PackedLinear
from tests.model.peers import copy, from_hugging_face

VOCAB_SIZE, PADDING, EOS = 8000, 7999, 0
DIM, FF_DIM, LAYERS, BATCH_SIZE = 512, 2048, 6, 32
Search = Callable[[], list[list[int]]]
ENGINES = (
    "clearhead float32",
    "clearhead int8",
    "transformers float32",
    "CTranslate2 float32",
    "CTranslate2 int8",
)
PAIRS = (  # engines whose ratios are printed
    ("clearhead float32", "transformers float32"),
    ("clearhead float32", "CTranslate2 float32"),
    ("clearhead int8", "CTranslate2 int8"),
    ("clearhead int8", "transformers float32"),
)


class Work(NamedTuple):
    """What to translate, and how."""

    sources: list[list[int]]
    beam: int
    tokens: int
    threads: int
    workers: int
    folder: str  # of the CTranslate2 model


def main() -> None:
    """Parse the options, run every engine, print the tables."""
    parser = argparse.ArgumentParser(prog="python -m bench.translate", description=__doc__.split("\n")[0])
    parser.add_argument("--sentences", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=24, help="tokens per source and per target")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--workers", type=int, default=1, help="concurrent batches of 32; with 2 or more, one thread each"
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--beams", default="1,4", help="beam sizes, separated by commas; 1 is greedy search")
    options = parser.parse_args()
    threads = options.threads if options.workers == 1 else 1
    torch.set_num_threads(threads)
    torch.manual_seed(1)
    sources = torch.randint(1, PADDING, (options.sentences, options.tokens)).tolist()
    print(f"{datetime.date.today()}  {machine(torch.device('cpu'))}")
    print(f"transformers {transformers.__version__}, CTranslate2 {ctranslate2.__version__}")
    ceilings = {dtype: ceiling(dtype, options.sentences * options.tokens) for dtype in ("float32", "int8")}
    print("matmul: " + ", ".join(f"{speed / 1e9:.0f} GFLOP/s in {dtype}" for dtype, speed in ceilings.items()))
    print(
        f"{LAYERS} + {LAYERS} layers, dim {DIM}, vocabulary {VOCAB_SIZE}; "
        f"{options.sentences} × {options.tokens} tokens\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        convert(pair()[1], folder)
        for beam in map(int, options.beams.split(",")):
            work = Work(sources, beam, options.tokens, threads, options.workers, folder)
            with ExitStack() as stack:
                sides = {name: stack.enter_context(Side(engine, name, work)) for name in ENGINES}
                compare(sides, beam, options.runs, options.sentences * options.tokens, ceilings)


def compare(sides: dict[str, Side], beam: int, runs: int, new_tokens: int, ceilings: dict[str, float]) -> None:
    """Let the engines take turns and print tokens/s and ratios."""
    outputs = {name: side.run().result for name, side in sides.items()}
    turns = [{name: side.run() for name, side in sides.items()} for _ in range(runs)]
    print(f"{'greedy' if beam == 1 else f'beam {beam}':<22} {'tokens/s':>9} {'of limit':>9} {'equal outputs':>14}")
    expected = outputs["transformers float32"]
    for name in sides:
        speed = new_tokens / statistics.median(turn[name].clock for turn in turns)
        of_limit = speed * flops_per_token(beam) / ceilings[name.split()[1]]
        equal = sum(a == b for a, b in zip(outputs[name], expected, strict=True))
        print(f"{name:<22} {speed:>9.0f} {of_limit:>9.0%} {equal:>10}/{len(expected)}")
    print(f"{'':<45} {'ratio':>6} {'by CPU time':>12}")
    for ours, theirs in PAIRS:
        clock = statistics.median(turn[theirs].clock / turn[ours].clock for turn in turns)
        cpu = statistics.median(turn[theirs].cpu / turn[ours].cpu for turn in turns)
        print(f"{ours:<17} to {theirs:<24} {clock:>6.2f} {cpu:>12.2f}")
    print(flush=True)


def flops_per_token(beam: int) -> float:
    """Return the matmul FLOPs per target token, including one source token."""
    attention, feed_forward, lm_head = DIM * DIM, DIM * FF_DIM, DIM * VOCAB_SIZE
    source = LAYERS * (4 * attention + 2 * feed_forward) + LAYERS * 2 * attention  # encoder, cross-attention k and v
    return 2.0 * (source + beam * (LAYERS * (6 * attention + 2 * feed_forward) + lm_head))


def ceiling(dtype: str, rows: int) -> float:
    """Return the best FLOP/s of a single feed-forward matmul with a packed weight."""
    x = torch.randn(rows, DIM)
    quantized, weight = x.to(torch.int8), torch.ones(FF_DIM, DIM, dtype=torch.int8).t()
    packed = PackedLinear(nn.Linear(DIM, FF_DIM), torch.float32)
    with torch.inference_mode():
        turns = [timed(lambda: torch._int_mm(quantized, weight) if dtype == "int8" else packed(x)) for _ in range(50)]
    return 2 * rows * DIM * FF_DIM / min(turn.clock for turn in turns)


def pair() -> tuple[Any, Any]:
    """Return transformer-base in both libraries with the same random weights, its logits scaled as after training."""
    torch.manual_seed(0)
    config = transformers.MarianConfig(
        vocab_size=VOCAB_SIZE,
        d_model=DIM,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=FF_DIM,
        decoder_ffn_dim=FF_DIM,
        max_position_embeddings=512,
        activation_function="relu",
        scale_embedding=True,
        dropout=0.0,
        pad_token_id=PADDING,
        decoder_start_token_id=PADDING,
        eos_token_id=EOS,
        forced_eos_token_id=None,
        attn_implementation="sdpa",
    )
    peer = transformers.MarianMTModel(config).eval()
    with torch.no_grad():
        peer.model.decoder.layers[-1].final_layer_norm.weight.mul_(6.0)
    config, table = from_hugging_face(peer)
    network = build(config).eval()
    copy(network, peer, table)
    return network, peer


def convert(peer: Any, folder: str) -> None:
    """Convert the peer's weights for CTranslate2, with tokens w0, w1 … and without padding, which it does not have."""
    spec = MarianMTLoader().get_model_spec(peer)
    vocabulary = [f"w{token}" for token in range(PADDING)]
    spec.register_source_vocabulary(vocabulary)
    spec.register_target_vocabulary(vocabulary)
    spec.config.eos_token = spec.config.decoder_start_token = vocabulary[EOS]
    spec.config.unk_token = vocabulary[1]
    spec.validate()
    spec.optimize()
    spec.save(folder)


def engine(name: str, work: Work) -> Search:
    """Return an engine's function, which gives the best hypothesis of every source."""
    torch.set_num_threads(work.threads)
    transformers.logging.set_verbosity_error()
    library, dtype = name.split()
    if library == "CTranslate2":
        return with_ctranslate2(dtype, work)
    network, peer = pair()
    if library == "transformers":
        return with_transformers(peer, work)
    return with_clearhead(network, getattr(torch, dtype), work)


def with_clearhead(network: Any, dtype: torch.dtype, work: Work) -> Search:
    """Clearhead's translate, as `Model.translate` calls it."""
    packed, tokens = pack_for_steps(network, dtype), work.tokens
    assert packed is not None, "the native step was not compiled"
    config = GenerationConfig(
        beam=work.beam,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        banned_ids=((PADDING,),),
        batch_size=BATCH_SIZE,
        workers=work.workers,
    )
    return lambda: [outputs[0].ids for outputs in translate(packed, work.sources, config, bos_id=PADDING, eos_ids=EOS)]


def with_transformers(peer: Any, work: Work) -> Search:
    """transformers' generate."""
    ids, tokens = torch.tensor(work.sources), work.tokens
    options = {"num_beams": work.beam, "do_sample": False, "min_new_tokens": tokens, "max_new_tokens": tokens}

    def run() -> list[list[int]]:
        hypotheses: list[list[int]] = []
        for batch in ids.split(BATCH_SIZE):
            outputs = peer.generate(
                input_ids=batch, attention_mask=torch.ones_like(batch), bad_words_ids=[[PADDING]], **options
            )
            hypotheses += outputs[:, 1:].tolist()
        return hypotheses

    return run


def with_ctranslate2(dtype: str, work: Work) -> Search:
    """CTranslate2's translate_batch."""
    sources = [[f"w{token}" for token in row] for row in work.sources]
    translator = ctranslate2.Translator(
        work.folder, compute_type=dtype, inter_threads=work.workers, intra_threads=work.threads
    )
    options = {"beam_size": work.beam, "min_decoding_length": work.tokens, "max_decoding_length": work.tokens}

    def run() -> list[list[int]]:
        results = translator.translate_batch(sources, max_batch_size=BATCH_SIZE, **options)
        return [[int(token[1:]) for token in result.hypotheses[0]] for result in results]

    return run


if __name__ == "__main__":
    main()
