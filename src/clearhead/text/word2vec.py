"""word2vec (Mikolov et al. 2013): skip-gram and CBOW with negative sampling, on CPU or GPU.

Workers, each a single-core thread, take segments of the text in turn and update the same two matrices without locks.
One worker is reproducible for a seed; several give vectors of the same quality.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import pad

from clearhead.config.settings import Settings
from clearhead.text.corpus import Corpus
from clearhead.text.negative_sampling import cbow, context_masks, skip_gram
from clearhead.text.word_vectors import WordVectors

BLOCK_SIZE = 24  # words per block; with 14 negatives and a window of 5, 48 columns fill whole registers
SHARED_NEGATIVES = 14  # negatives shared by a block
SEGMENT_SIZE = 100_000  # words prepared at once; sentences are cut at its end
MIN_UPDATES = 1000  # per epoch, however short the text
MAX_PAIRS = 5.0  # learning rate × pairs of one word per update, above which its gradient is scaled down


class Word2VecSettings(Settings):
    """Hyperparameters. The learning rate decays linearly from `lr` to lr / 250 over all epochs.

    CBOW divides a word's gradient among its context, which the original program does not, so its `lr` is higher.
    """

    dim: int = Field(100, ge=1, le=4096)
    window: int = Field(5, ge=1, le=50)  # maximum; each word samples its window size from 1 … window
    negatives: int = Field(5, ge=1, le=100)  # per pair
    epochs: int = Field(5, ge=1, le=10_000)
    cbow: bool = False  # predict a word from the mean of its context, instead of the context from the word
    lr: float = Field(default_factory=lambda values: 0.15 if values["cbow"] else 0.035, gt=0, le=1)
    sample: float = Field(1e-3, gt=0, le=1)  # words above this frequency are subsampled
    workers: int = Field(1, ge=1, le=256)
    seed: int = Field(1, ge=0, le=2**31)


class Segment(NamedTuple):
    """A subsampled segment of the text, split into updates; padding words have no context.

    U updates · n blocks · B words per block · C columns · N shared negatives
    """

    sources: Tensor  # (U, n, B) words whose input vectors are used; for CBOW (U, n, C) columns
    targets: Tensor  # (U, n, C + N) columns and negatives; for CBOW (U, n, B + N) words and negatives
    weight_rows: Tensor  # (U, n · B) row of the weight table for each word's context


class Training:
    """Input and output vectors and a text. Iterating trains, and yields the fraction of the work that is done."""

    def __init__(self, corpus: Corpus, settings: Word2VecSettings, device: str = "cpu"):
        self.corpus, self.settings, self.device = corpus, settings, torch.device(device)
        self.ids, self.sentences = (tensor.to(self.device) for tensor in (corpus.ids, corpus.sentences))
        frequency = corpus.counts.double() / corpus.counts.sum()
        self.keep = keep_probability(frequency, settings.sample).float().to(self.device)
        noise = noise_distribution(frequency)
        self.noise = noise.cumsum(0).to(self.device)
        max_words = 512 if self.device.type == "cpu" else 4096  # large enough to amortize the calls of an update
        self.update_size = max(BLOCK_SIZE, min(max_words, len(corpus.ids) // MIN_UPDATES) // BLOCK_SIZE * BLOCK_SIZE)
        weight = context_masks(BLOCK_SIZE, settings.window)  # (B, W + 1, W + 1, C)
        context_size = weight.sum(-1, keepdim=True)
        self.negative_weight = settings.negatives / SHARED_NEGATIVES
        if settings.cbow:
            weight /= context_size.clamp(min=1)
        else:
            negatives = (context_size * self.negative_weight).expand(*context_size.shape[:-1], SHARED_NEGATIVES)
            weight = torch.cat([weight, negatives], dim=-1)
        self.weight = weight.flatten(0, -2).to(self.device)
        kept = frequency * self.keep.cpu()
        scales = self._gradient_scales(kept / kept.sum(), noise)
        self.gradient_scales = [scale.float().to(self.device) for scale in scales]
        start = torch.rand(len(frequency), settings.dim, generator=torch.Generator().manual_seed(settings.seed))
        self.inputs = ((start - 0.5) / settings.dim).to(self.device)
        self.outputs = torch.zeros_like(self.inputs)

    def __iter__(self) -> Iterator[float]:
        starts = range(0, len(self.ids), SEGMENT_SIZE)
        total = self.settings.epochs * len(starts)
        threads = torch.get_num_threads()
        stop = threading.Event()
        pool = ThreadPoolExecutor(self.settings.workers, initializer=torch.set_num_threads, initargs=(1,))
        try:
            futures = [
                pool.submit(self._train_segment, number, start, total, stop)
                for number, start in enumerate(list(starts) * self.settings.epochs)
            ]
            for done, future in enumerate(as_completed(futures), start=1):
                future.result()
                yield done / total
        finally:  # also when the caller stops early
            stop.set()
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(threads)

    def vectors(self) -> WordVectors:
        """Return a copy of the input vectors."""
        return WordVectors(self.corpus.vocab, self.inputs.cpu().clone())

    def _gradient_scales(self, kept: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Scales (V,) ≤ 1 for the gradients of inputs and outputs, below 1 for very frequent words.

        A sum of many gradients taken at the same point overshoots; a sum over `MAX_PAIRS` pairs does not.
        """
        settings = self.settings
        words = self.update_size * settings.workers * settings.lr
        context_size = settings.window + 1  # on average
        if settings.cbow:
            pairs = kept * (1 + settings.negatives), kept + settings.negatives * noise
        else:
            pairs = context_size * kept * (1 + settings.negatives), context_size * (kept + settings.negatives * noise)
        inputs, outputs = ((MAX_PAIRS / (words * each)).clamp(max=1) for each in pairs)
        return inputs, outputs

    def _train_segment(self, number: int, start: int, total: int, stop: threading.Event) -> None:
        """Train on the segment at word `start`, the `number`-th of `total`."""
        generator = torch.Generator(self.device).manual_seed(self.settings.seed * 1_000_003 + number)
        segment = self._sample_segment(start, generator)
        for update, (sources, targets, rows) in enumerate(zip(*segment, strict=True)):
            if stop.is_set():
                return
            done = (number + update / len(segment.weight_rows)) / total
            lr = self.settings.lr * max(1 - done, 1 / 250)
            self._update(sources, targets, self.weight.index_select(0, rows).view(len(sources), BLOCK_SIZE, -1), lr)

    def _update(self, sources: Tensor, targets: Tensor, weight: Tensor, lr: float) -> None:
        """Take one SGD step on n blocks: sources (n, …) are rows of inputs, targets (n, …) of outputs."""
        ids = sources.flatten(), targets.flatten()
        u = self.inputs.index_select(0, ids[0]).view(*sources.shape, -1)
        x = self.outputs.index_select(0, ids[1]).view(*targets.shape, -1)
        if self.settings.cbow:
            gradients = cbow(u, x, weight, self.negative_weight)
        else:
            gradients = skip_gram(u, x, weight, SHARED_NEGATIVES)
        matrices = self.inputs, self.outputs
        for matrix, rows, gradient, scale in zip(matrices, ids, gradients, self.gradient_scales, strict=True):
            factor = scale.index_select(0, rows).view(*gradient.shape[:2], 1)
            matrix.index_add_(0, rows, gradient.mul_(factor).flatten(0, 1), alpha=-lr)

    def _sample_segment(self, start: int, generator: torch.Generator) -> Segment:
        """Subsample frequent words, and sample window sizes and negatives."""
        window, device = self.settings.window, self.device
        ids = self.ids[start : start + SEGMENT_SIZE]
        kept = (torch.rand(len(ids), generator=generator, device=device) < self.keep[ids]).nonzero().squeeze(1)
        sentences = self.sentences[start : start + SEGMENT_SIZE][kept]
        left, right = sample_windows(sentences, window, generator)
        ids, count = ids[kept], len(kept)
        padding = -count % self.update_size
        blocks = (count + padding) // BLOCK_SIZE
        padded = pad(ids, (window, window + padding))
        columns = padded.as_strided((blocks, BLOCK_SIZE + 2 * window), (BLOCK_SIZE, 1))
        weight_rows = pad(left * (window + 1) + right, (0, padding)).view(blocks, BLOCK_SIZE)
        weight_rows = weight_rows + torch.arange(BLOCK_SIZE, device=device) * (window + 1) ** 2
        uniform = torch.rand(blocks, SHARED_NEGATIVES, generator=generator, device=device, dtype=torch.float64)
        negatives = torch.searchsorted(self.noise, uniform * self.noise[-1], right=True, out_int32=True)
        words = padded[window : window + count + padding].view(blocks, BLOCK_SIZE)
        sources, positives = (columns, words) if self.settings.cbow else (words, columns)
        targets = torch.cat([positives, negatives], dim=1)
        updates, n = blocks * BLOCK_SIZE // self.update_size, self.update_size // BLOCK_SIZE
        return Segment(
            sources.contiguous().unflatten(0, (updates, n)),
            targets.unflatten(0, (updates, n)),
            weight_rows.view(updates, self.update_size),
        )


def train(corpus: Corpus, settings: Word2VecSettings, device: str = "cpu") -> WordVectors:
    """Train word vectors."""
    training = Training(corpus, settings, device)
    for _ in training:
        pass
    return training.vectors()


def keep_probability(frequency: Tensor, sample: float) -> Tensor:
    """Probability of keeping an occurrence of a word of frequency f: √(t/f) + t/f, at most 1."""
    ratio = sample / frequency
    return (ratio.sqrt() + ratio).clamp(max=1)


def noise_distribution(frequency: Tensor) -> Tensor:
    """Distribution of the negatives: frequency to the power of 3/4, normalized."""
    power = frequency**0.75
    return power / power.sum()


def sample_windows(sentences: Tensor, window: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sample the context size of each word from 1 … window; return left and right sizes, clipped to the sentence."""
    count = len(sentences)
    position = torch.arange(count, device=sentences.device)
    is_start = torch.ones(count, dtype=torch.bool, device=sentences.device)
    is_start[1:] = sentences[1:] != sentences[:-1]
    starts = torch.cat([is_start.nonzero().squeeze(1), position.new_tensor([count])])
    sentence = is_start.cumsum(0)  # from 1
    first, last = starts[sentence - 1], starts[sentence] - 1
    size = torch.randint(1, window + 1, (count,), generator=generator, device=sentences.device)
    return torch.minimum(size, position - first), torch.minimum(size, last - position)
