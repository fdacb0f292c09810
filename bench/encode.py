"""Sentence vectors beside transformers on the same MiniLM weights, in one run: sentences a second, and the ratio.

    python -m bench.encode                          two threads; random weights of MiniLM's shape
    python -m bench.encode --weights FOLDER         MiniLM as transformers keeps it (config.json, model.safetensors)
    python -m bench.encode --device cuda --batch 256

Real lengths: the sentences of STS-B's and SST-2's development files, as ids (tokenizing is the same work for both).
transformers gets them sorted by length, in batches padded to their longest; we pack them. Both sides take turns; a
ratio is the median of the ratios of each turn. `to fp32` is the ratio to transformers' fp32; beside it the largest
distance of a vector from theirs in fp32, and Spearman's correlation on STS-B, ours (theirs).
"""

import argparse
import copy
import csv
import datetime
import gzip
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.nn import functional as F

from bench.timing import machine
from clearhead.checkpoint.folder import with_weights
from clearhead.checkpoint.formats import read_foreign
from clearhead.evaluate import spearman
from clearhead.model.heads import mean_pool
from clearhead.predict import Model
from clearhead.predict.encode_batch import Row, read
from clearhead.text import Tokenizer, load_folder

DATA = Path(os.environ.get("CLEARHEAD_DATA", "../shared/data"))
SHAPE = {"vocab_size": 30522, "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12}
Work = Callable[[], np.ndarray[Any, Any]]


def main() -> None:
    """Parse the options, run every corpus in every precision, print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.encode", description=__doc__.split("\n")[0])
    parser.add_argument("--weights", type=Path, help="a folder that transformers reads; else random weights")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sentences", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=64, help="sentences of a batch of transformers")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    device = torch.device(options.device)
    peer = _peer(options.weights).to(device)
    tokenizer = load_folder(DATA / "tokenizers/bert_uncased")[0]
    corpora, scores = texts(options.sentences)
    print(f"{datetime.date.today()}  {machine(device)}  transformers {transformers.__version__}")
    print(f"MiniLM, {'real' if options.weights else 'random'} weights; batches of {options.batch} for transformers\n")
    print(
        f"{'texts':<6} {'precision':<10} {'clearhead':>11} {'transformers':>13} {'ratio':>6} {'to fp32':>8}  distance  "
        "Spearman"
    )
    for name, sentences in corpora.items():
        rows = [_framed(ids, tokenizer) for ids in tokenizer.encode_batch(sentences)]
        plain = _theirs(peer, rows, options.batch, device)
        for precision, ours, theirs in _sides(peer, tokenizer, rows, options.batch, device):
            found, wanted = ours(), plain()
            distance = float(np.linalg.norm(found - wanted, axis=1).max())
            told = f"{_agreement(found, scores):.4f} ({_agreement(wanted, scores):.4f})" if name == "STS-B" else ""
            times = [tuple(_seconds(work, device) for work in (ours, theirs, plain)) for _ in range(options.runs)]
            rates = [len(rows) / statistics.median(column) for column in list(zip(*times, strict=True))[:2]]
            ratio, to_plain = (statistics.median(turn[n] / turn[0] for turn in times) for n in (1, 2))
            print(
                f"{name:<6} {precision:<10} {rates[0]:>9.0f}/s {rates[1]:>11.0f}/s {ratio:>6.2f} {to_plain:>8.2f}  "
                f"{distance:>8.1e}  {told}",
                flush=True,
            )


def texts(most: int) -> tuple[dict[str, list[str]], list[float]]:
    """Sentences by corpus; those of STS-B stand in pairs, whose scores come with them."""
    with gzip.open(DATA / "stsb/stsb-en-dev.csv.gz", "rt", encoding="utf-8") as file:
        pairs = list(csv.reader(file))[: most // 2]
    with gzip.open(DATA / "sst2/dev.tsv.gz", "rt", encoding="utf-8") as file:
        phrases = [line.split("\t")[0] for line in file.read().splitlines()[1 : most + 1]]
    return {"STS-B": [text for pair in pairs for text in pair[:2]], "SST-2": phrases}, [
        float(pair[2]) for pair in pairs
    ]


def _peer(folder: Path | None) -> Any:
    if folder is not None:
        return transformers.BertModel.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32).eval()
    config = transformers.BertConfig(**SHAPE, intermediate_size=1536, attn_implementation="sdpa")
    return transformers.BertModel(config).eval()


def _framed(ids: list[int], tokenizer: Tokenizer) -> Row:
    row = [tokenizer.id("class"), *ids[:254], tokenizer.id("separator")]
    return Row(row, len(row))


def _sides(
    peer: Any, tokenizer: Tokenizer, rows: list[Row], batch: int, device: torch.device
) -> list[tuple[str, Work, Work]]:
    """(precision, our work, theirs), each giving the vectors of all rows; int8 stands beside their fp32."""
    with tempfile.TemporaryDirectory() as folder:
        peer.save_pretrained(folder)
        found = read_foreign(Path(folder))
    network = with_weights(found.config, found.weights, "transformers").eval().to(device)
    fp32 = _theirs(peer, rows, batch, device)
    half = _theirs(copy.deepcopy(peer).to(torch.bfloat16), rows, batch, device)
    sides = [("fp32", torch.float32, fp32), ("bf16", torch.bfloat16, half)]
    if device.type == "cpu":
        sides.append(("int8", torch.int8, fp32))
    return [(name, _ours(network, dtype, tokenizer, rows), theirs) for name, dtype, theirs in sides]


def _ours(network: Any, dtype: torch.dtype, tokenizer: Tokenizer, rows: list[Row]) -> Work:
    if next(network.parameters()).is_cuda:
        network = copy.deepcopy(network).to(dtype)  # on a CPU the reader turns it, and lays it out
    model = Model(network, (tokenizer,), dtype=dtype)
    return lambda: np.stack(
        read(
            model,
            rows,
            lambda hidden, documents, _: list(
                F.normalize(mean_pool(hidden, None, documents).float(), dim=-1).cpu().numpy()
            ),
        )
    )


def _theirs(peer: Any, rows: list[Row], batch: int, device: torch.device) -> Work:
    order = sorted(range(len(rows)), key=lambda n: -len(rows[n].ids))

    def work() -> np.ndarray[Any, Any]:
        found = np.empty((len(rows), peer.config.hidden_size), np.float32)
        with torch.inference_mode():
            for start in range(0, len(order), batch):
                chosen = order[start : start + batch]
                max_length = len(rows[chosen[0]].ids)
                ids = torch.tensor([rows[n].ids + [0] * (max_length - len(rows[n].ids)) for n in chosen], device=device)
                mask = torch.tensor(
                    [[1] * len(rows[n].ids) + [0] * (max_length - len(rows[n].ids)) for n in chosen], device=device
                )
                hidden = peer(input_ids=ids, attention_mask=mask).last_hidden_state.float()
                vectors = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
                found[chosen] = F.normalize(vectors, dim=-1).cpu().numpy()
        return found

    return work


def _agreement(vectors: np.ndarray[Any, Any], scores: list[float]) -> float:
    return spearman((vectors[0::2] * vectors[1::2]).sum(1).tolist(), scores)


def _seconds(work: Work, device: torch.device) -> float:
    begun = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
