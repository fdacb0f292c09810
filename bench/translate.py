"""Translation beside transformers' generate on the same random weights, in one run: tokens a second, and the ratio.

    python -m bench.translate                 greedy and beam 4, transformer-base, 32 sentences of 24 tokens
    python -m bench.translate --runs 9        more of them, for a machine that others use too

Both sides take turns; a ratio is the median of the ratios of each turn, so that a slow moment of the machine falls on
both. Where others use the machine, two threads mostly wait for each other: --threads 1 and the ratio by CPU time then
say more. Every sentence gets the same number of tokens on both sides, and the texts are compared.
"""

import argparse
import datetime
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

from bench.timing import machine
from clearhead.config import DecodeConfig
from clearhead.decode import packed, translate
from clearhead.model import build
from tests.model.peers import copy, from_hugging_face

WORDS, PADDING, END = 8000, 7999, 0


def main() -> None:
    """Parse the options, run every search, print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.translate", description=__doc__.split("\n")[0])
    parser.add_argument("--sentences", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=24, help="of each source and each target")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--beams", default="1,4", help="separated by commas; 1 is greedy search")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    device = torch.device(options.device)
    network, peer = pair(device)
    sources = torch.randint(1, PADDING, (options.sentences, options.tokens)).tolist()
    print(f"{datetime.date.today()}  {machine(device)}  transformers {transformers.__version__}  float32")
    print(f"6 + 6 layers of 512, {WORDS} words; {options.sentences} sentences of {options.tokens} tokens\n")
    print(f"{'search':<8} {'clearhead':>10} {'transformers':>13} {'ratio':>6} {'by CPU time':>12}  same texts")
    for beam in map(int, options.beams.split(",")):
        ours, theirs = searches(network, peer, sources, beam, options.tokens, device)
        same = sum(a == b for a, b in zip(ours(), theirs(), strict=True))
        times = [(_seconds(ours, device), _seconds(theirs, device)) for _ in range(options.runs)]
        written = options.sentences * options.tokens
        rates = [written / statistics.median(wall for wall, _ in column) for column in zip(*times, strict=True)]
        ratio, by_cpu = (statistics.median(b[n] / a[n] for a, b in times) for n in range(2))
        name = "greedy" if beam == 1 else f"beam {beam}"
        numbers = f"{rates[0]:>8.0f}/s {rates[1]:>11.0f}/s {ratio:>6.2f} {by_cpu:>12.2f}"
        print(f"{name:<8} {numbers}  {same}/{len(sources)}", flush=True)


def pair(device: torch.device) -> tuple[Any, Any]:
    """Transformer-base with random weights, ours and theirs, scores spread as after training."""
    config = transformers.MarianConfig(
        vocab_size=WORDS,
        d_model=512,
        encoder_layers=6,
        decoder_layers=6,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=2048,
        decoder_ffn_dim=2048,
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
    return packed(network.to(device)), peer.to(device)


def searches(
    network: Any, peer: Any, sources: list[list[int]], beam: int, tokens: int, device: torch.device
) -> tuple[Callable[[], list[list[int]]], Callable[[], list[list[int]]]]:
    """Our search and theirs, each giving the best text of every source."""
    config = DecodeConfig(beam=beam, max_new_tokens=tokens, min_new_tokens=tokens, banned=((PADDING,),))
    ids = torch.tensor(sources, device=device)

    def ours() -> list[list[int]]:
        return [outputs[0].ids for outputs in translate(network, sources, config, begin=PADDING, end=END)]

    def theirs() -> list[list[int]]:
        found = peer.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            num_beams=beam,
            do_sample=False,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            bad_words_ids=[[PADDING]],
        )
        return found[:, 1:].tolist()

    return ours, theirs


def _seconds(work: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """By the clock, and of this process."""
    begun, used = time.perf_counter(), time.process_time()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun, time.process_time() - used


if __name__ == "__main__":
    main()
