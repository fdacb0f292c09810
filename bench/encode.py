"""Sentence embedding speed against transformers on the same MiniLM weights: sentences/s and ratios.

    python -m bench.encode                          two threads; random weights in MiniLM's shape
    python -m bench.encode --weights FOLDER         MiniLM in transformers' format (config.json, model.safetensors)
    python -m bench.encode --device cuda --batch 256

The sentences are STS-B's and SST-2's dev sets, already tokenized. transformers gets them sorted by length and padded to
the longest of each batch; Clearhead packs them. The sides take turns; a ratio is the median of each turn's ratios.
`to fp32` is the speed ratio to transformers in fp32, `distance` the largest distance of an embedding from
transformers' in fp32, and `Spearman` the correlation on STS-B, ours (theirs).
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
from clearhead.checkpoint.formats import read_foreign
from clearhead.checkpoint.model_folder import build_with_weights
from clearhead.evaluate import spearman
from clearhead.model.heads import mean_pool
from clearhead.predict import Model
from clearhead.predict.encode_batch import Row, encode_packed
from clearhead.text import Tokenizer, load_folder

DATA = Path(os.environ.get("CLEARHEAD_DATA", "../shared/data"))
SHAPE = {"vocab_size": 30522, "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12}
Work = Callable[[], np.ndarray[Any, Any]]


def main() -> None:
    """Parse the options, run every dataset in every precision, print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.encode", description=__doc__.split("\n")[0])
    parser.add_argument("--weights", type=Path, help="a transformers model folder; default: random weights")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sentences", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=64, help="transformers' batch size")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    device = torch.device(options.device)
    peer = _peer(options.weights).to(device)
    tokenizer = load_folder(DATA / "tokenizers/bert_uncased")[0]
    datasets, gold_scores = sentences(options.sentences)
    print(f"{datetime.date.today()}  {machine(device)}  transformers {transformers.__version__}")
    print(f"MiniLM, {'trained' if options.weights else 'random'} weights; transformers' batch size {options.batch}\n")
    print(
        f"{'dataset':<7} {'precision':<9} {'clearhead':>11} {'transformers':>13} {'ratio':>6} {'to fp32':>8}  "
        "distance  Spearman"
    )
    for name, texts in datasets.items():
        rows = [_add_special_tokens(ids, tokenizer) for ids in tokenizer.encode_batch(texts)]
        theirs_fp32 = _theirs(peer, rows, options.batch, device)
        for precision, ours, theirs in _sides(peer, tokenizer, rows, options.batch, device):
            vectors, expected = ours(), theirs_fp32()
            distance = float(np.linalg.norm(vectors - expected, axis=1).max())
            correlations = ""
            if name == "STS-B":
                correlations = f"{_correlation(vectors, gold_scores):.4f} ({_correlation(expected, gold_scores):.4f})"
            times = [tuple(_seconds(work, device) for work in (ours, theirs, theirs_fp32)) for _ in range(options.runs)]
            speeds = [len(rows) / statistics.median(column) for column in list(zip(*times, strict=True))[:2]]
            ratio, to_fp32 = (statistics.median(turn[n] / turn[0] for turn in times) for n in (1, 2))
            print(
                f"{name:<7} {precision:<9} {speeds[0]:>9.0f}/s {speeds[1]:>11.0f}/s {ratio:>6.2f} {to_fp32:>8.2f}  "
                f"{distance:>8.1e}  {correlations}",
                flush=True,
            )


def sentences(limit: int) -> tuple[dict[str, list[str]], list[float]]:
    """Return sentences by dataset, and the gold scores of STS-B, whose sentences come in pairs."""
    with gzip.open(DATA / "stsb/stsb-en-dev.csv.gz", "rt", encoding="utf-8") as file:
        pairs = list(csv.reader(file))[: limit // 2]
    with gzip.open(DATA / "sst2/dev.tsv.gz", "rt", encoding="utf-8") as file:
        phrases = [line.split("\t")[0] for line in file.read().splitlines()[1 : limit + 1]]
    datasets = {"STS-B": [text for pair in pairs for text in pair[:2]], "SST-2": phrases}
    return datasets, [float(pair[2]) for pair in pairs]


def _peer(folder: Path | None) -> Any:
    if folder is not None:
        return transformers.BertModel.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32).eval()
    config = transformers.BertConfig(**SHAPE, intermediate_size=1536, attn_implementation="sdpa")
    return transformers.BertModel(config).eval()


def _add_special_tokens(ids: list[int], tokenizer: Tokenizer) -> Row:
    row = [tokenizer.id("class"), *ids[:254], tokenizer.id("separator")]
    return Row(row, len(row))


def _sides(
    peer: Any, tokenizer: Tokenizer, rows: list[Row], batch: int, device: torch.device
) -> list[tuple[str, Work, Work]]:
    """Return (precision, ours, theirs), functions that embed all rows; our int8 is compared with their fp32."""
    with tempfile.TemporaryDirectory() as folder:
        peer.save_pretrained(folder)
        imported = read_foreign(Path(folder))
    network = build_with_weights(imported.config, imported.weights, "transformers").eval().to(device)
    fp32 = _theirs(peer, rows, batch, device)
    bf16 = _theirs(copy.deepcopy(peer).to(torch.bfloat16), rows, batch, device)
    sides = [("fp32", torch.float32, fp32), ("bf16", torch.bfloat16, bf16)]
    if device.type == "cpu":
        sides.append(("int8", torch.int8, fp32))
    return [(name, _ours(network, dtype, tokenizer, rows), theirs) for name, dtype, theirs in sides]


def _ours(network: Any, dtype: torch.dtype, tokenizer: Tokenizer, rows: list[Row]) -> Work:
    if next(network.parameters()).is_cuda:
        network = copy.deepcopy(network).to(dtype)  # on a CPU, optimize_for_inference converts it
    model = Model(network, (tokenizer,), dtype=dtype)
    return lambda: np.stack(
        encode_packed(
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
        out = np.empty((len(rows), peer.config.hidden_size), np.float32)
        with torch.inference_mode():
            for start in range(0, len(order), batch):
                indices = order[start : start + batch]
                lengths = torch.tensor([len(rows[n].ids) for n in indices], device=device)
                max_length = len(rows[indices[0]].ids)
                ids = torch.tensor(
                    [rows[n].ids + [0] * (max_length - len(rows[n].ids)) for n in indices], device=device
                )
                mask = (torch.arange(max_length, device=device) < lengths[:, None]).long()
                hidden = peer(input_ids=ids, attention_mask=mask).last_hidden_state.float()
                vectors = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
                out[indices] = F.normalize(vectors, dim=-1).cpu().numpy()
        return out

    return work


def _correlation(vectors: np.ndarray[Any, Any], scores: list[float]) -> float:
    return spearman((vectors[0::2] * vectors[1::2]).sum(1).tolist(), scores)


def _seconds(work: Work, device: torch.device) -> float:
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
