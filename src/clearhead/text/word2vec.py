"""word2vec (Mikolov et al. 2013): skip-gram and CBOW with negative sampling, trained from a corpus on CPU or GPU.

Several workers, each a thread of one core, take stretches of the text in turn and change the same two matrices without
locks. One worker with one seed gives the same vectors every time; several give vectors of the same quality.
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
from clearhead.text.negatives import cbow, context, skip_gram
from clearhead.text.vectors import WordVectors

BLOCK, SHARED = 24, 14  # words of a block, and the negatives they share: 48 columns with a window of 5, whole registers
STRETCH = 100_000  # tokens that are drawn and prepared at once; a sentence is cut where one ends
UPDATES = 1000  # an epoch changes the vectors at least this often, however short the text
STABLE = 5.0  # learning rate × pairs of one word in one update, above which the word's changes are made smaller


class Word2VecSettings(Settings):
    """What can be set. The learning rate falls from `learning_rate` to 1/250 of it over all epochs.

    CBOW shares a word's gradient among its context, which the original program does not, so its rate is larger.
    """

    dim: int = Field(100, ge=1, le=4096)
    window: int = Field(5, ge=1, le=50)  # each word draws its reach from 1 … window
    negatives: int = Field(5, ge=1, le=100)  # for each pair
    epochs: int = Field(5, ge=1, le=10_000)
    cbow: bool = False  # predict a word from the mean of its context, instead of the context from the word
    learning_rate: float = Field(default_factory=lambda given: 0.15 if given["cbow"] else 0.035, gt=0, le=1)
    sample: float = Field(1e-3, gt=0, le=1)  # words of a larger share of the text than this are thinned out
    workers: int = Field(1, ge=1, le=256)
    seed: int = Field(1, ge=0, le=2**31)


class Stretch(NamedTuple):
    """A stretch of the text after thinning, cut into updates; places filled up at the end see nothing."""

    sources: Tensor  # (updates, n, B) the words, whose input vectors are used; for CBOW (updates, n, C) the columns
    targets: Tensor  # (updates, n, C + N) the columns and the negatives; for CBOW (updates, n, B + N) with the words
    views: Tensor  # (updates, n · B) row of the table of weights that says what a word sees


class Training:
    """Two matrices and a text. Iterating over it trains, and gives the share of the work that is done."""

    def __init__(self, corpus: Corpus, settings: Word2VecSettings, device: str = "cpu"):
        self.corpus, self.settings, self.device = corpus, settings, torch.device(device)
        self.ids, self.sentences = (each.to(self.device) for each in (corpus.ids, corpus.sentences))
        share = corpus.counts.double() / corpus.counts.sum()
        self.keep = kept_share(share, settings.sample).float().to(self.device)
        noise = noise_share(share)
        self.noise = noise.cumsum(0).to(self.device)
        largest = 512 if self.device.type == "cpu" else 4096  # words: an update should outweigh the calls it takes
        self.size = max(BLOCK, min(largest, len(corpus.ids) // UPDATES) // BLOCK * BLOCK)
        weight = context(BLOCK, settings.window)  # (B, W + 1, W + 1, C)
        seen = weight.sum(-1, keepdim=True)
        self.share = settings.negatives / SHARED
        if settings.cbow:
            weight /= seen.clamp(min=1)
        else:
            weight = torch.cat([weight, (seen * self.share).expand(*seen.shape[:-1], SHARED)], dim=-1)
        self.weight = weight.flatten(0, -2).to(self.device)
        kept = share * self.keep.cpu()
        self.damp = [each.float().to(self.device) for each in self._damping(kept / kept.sum(), noise)]
        start = torch.rand(len(share), settings.dim, generator=torch.Generator().manual_seed(settings.seed))
        self.inputs = ((start - 0.5) / settings.dim).to(self.device)
        self.outputs = torch.zeros_like(self.inputs)

    def __iter__(self) -> Iterator[float]:
        starts = range(0, len(self.ids), STRETCH)
        total = self.settings.epochs * len(starts)
        threads = torch.get_num_threads()
        stop = threading.Event()
        pool = ThreadPoolExecutor(self.settings.workers, initializer=torch.set_num_threads, initargs=(1,))
        try:
            jobs = [
                pool.submit(self._train, number, start, total, stop)
                for number, start in enumerate(list(starts) * self.settings.epochs)
            ]
            for done, job in enumerate(as_completed(jobs), start=1):
                job.result()
                yield done / total
        finally:  # also when the caller stops before the end
            stop.set()
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(threads)

    def vectors(self) -> WordVectors:
        """What has been learned: the input vectors."""
        return WordVectors(self.corpus.words, self.inputs.cpu().clone())

    def _damping(self, kept: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Factors (words,) for changes of inputs and outputs, below 1 for words too frequent to sum over an update.

        A sum of many gradients taken at the same point overshoots; a sum of `STABLE` pairs' worth does not.
        """
        settings = self.settings
        words, reach = self.size * settings.workers * settings.learning_rate, settings.window + 1  # seen on average
        if settings.cbow:
            pairs = kept * (1 + settings.negatives), kept + settings.negatives * noise
        else:
            pairs = reach * kept * (1 + settings.negatives), reach * (kept + settings.negatives * noise)
        inputs, outputs = ((STABLE / (words * each)).clamp(max=1) for each in pairs)
        return inputs, outputs

    def _train(self, number: int, start: int, total: int, stop: threading.Event) -> None:
        """Learn from the stretch at `start`, which is the `number`-th of `total`."""
        generator = torch.Generator(self.device).manual_seed(self.settings.seed * 1_000_003 + number)
        stretch = self._stretch(start, generator)
        for update, (sources, targets, views) in enumerate(zip(*stretch, strict=True)):
            if stop.is_set():
                return
            done = (number + update / len(stretch.views)) / total
            rate = self.settings.learning_rate * max(1 - done, 1 / 250)
            self._update(sources, targets, self.weight.index_select(0, views).view(len(sources), BLOCK, -1), rate)

    def _update(self, sources: Tensor, targets: Tensor, weight: Tensor, rate: float) -> None:
        """One step down the gradient of all blocks: sources (n, …) are rows of inputs, targets (n, …) of outputs."""
        ids = sources.flatten(), targets.flatten()
        u = self.inputs.index_select(0, ids[0]).view(*sources.shape, -1)
        x = self.outputs.index_select(0, ids[1]).view(*targets.shape, -1)
        changes = cbow(u, x, weight, self.share) if self.settings.cbow else skip_gram(u, x, weight, SHARED)
        for matrix, rows, change, damp in zip((self.inputs, self.outputs), ids, changes, self.damp, strict=True):
            factor = damp.index_select(0, rows).view(*change.shape[:2], 1)
            matrix.index_add_(0, rows, change.mul_(factor).flatten(0, 1), alpha=-rate)

    def _stretch(self, start: int, generator: torch.Generator) -> Stretch:
        """Thin out frequent words, draw how far each word sees and the negatives."""
        window, device = self.settings.window, self.device
        ids = self.ids[start : start + STRETCH]
        kept = (torch.rand(len(ids), generator=generator, device=device) < self.keep[ids]).nonzero().squeeze(1)
        sentences = self.sentences[start : start + STRETCH][kept]
        left, right = reaches(sentences, window, generator)
        ids, count = ids[kept], len(kept)
        rest = -count % self.size
        blocks = (count + rest) // BLOCK
        around = pad(ids, (window, window + rest))
        columns = around.as_strided((blocks, BLOCK + 2 * window), (BLOCK, 1))
        view = pad(left * (window + 1) + right, (0, rest)).view(blocks, BLOCK)
        view = view + torch.arange(BLOCK, device=device) * (window + 1) ** 2
        drawn = torch.rand(blocks, SHARED, generator=generator, device=device, dtype=torch.float64) * self.noise[-1]
        noise = torch.searchsorted(self.noise, drawn, right=True, out_int32=True)
        words = around[window : window + count + rest].view(blocks, BLOCK)
        sources, seen = (columns, words) if self.settings.cbow else (words, columns)
        targets = torch.cat([seen, noise], dim=1)
        updates, n = blocks * BLOCK // self.size, self.size // BLOCK
        return Stretch(
            sources.contiguous().unflatten(0, (updates, n)),
            targets.unflatten(0, (updates, n)),
            view.view(updates, self.size),
        )


def train(corpus: Corpus, settings: Word2VecSettings, device: str = "cpu") -> WordVectors:
    """Train to the end."""
    training = Training(corpus, settings, device)
    for _ in training:
        pass
    return training.vectors()


def kept_share(share: Tensor, sample: float) -> Tensor:
    """How likely an occurrence of a word is kept, given the word's share of the text: √(t/f) + t/f, at most 1."""
    ratio = sample / share
    return (ratio.sqrt() + ratio).clamp(max=1)


def noise_share(share: Tensor) -> Tensor:
    """How likely a word is drawn as a negative: its count to the power of 3/4, normalized."""
    power = share**0.75
    return power / power.sum()


def reaches(sentences: Tensor, window: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """How many words each token sees to its left and right: a draw from 1 … window, cut at the ends of its sentence."""
    count = len(sentences)
    place = torch.arange(count, device=sentences.device)
    new = torch.ones(count, dtype=torch.bool, device=sentences.device)  # a sentence begins here
    new[1:] = sentences[1:] != sentences[:-1]
    starts = torch.cat([new.nonzero().squeeze(1), place.new_tensor([count])])
    number = new.cumsum(0)  # of the sentence, from 1
    first, last = starts[number - 1], starts[number] - 1
    reach = torch.randint(1, window + 1, (count,), generator=generator, device=sentences.device)
    return torch.minimum(reach, place - first), torch.minimum(reach, last - place)
