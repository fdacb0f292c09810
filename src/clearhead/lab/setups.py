"""Sizes that experiments share: a small character model and a small translator, quick or full."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from clearhead.lab.ensemble import Batch, Ensemble, Forward, Training, greedy, to_device
from clearhead.lab.runner import Metrics, Run
from clearhead.lab.tasks import BEGIN, Data, Translation, bleu, characters, tatoeba, until_end


class Setup(NamedTuple):
    """What `Run.compare` needs: model settings, data and training settings."""

    base: Mapping[str, Any]
    data: Data
    training: Training

    def compare(self, run: Run, variants: Any, tests: Mapping[str, Batch] | None = None, after: Any = None) -> Any:
        """Train and test the variants, on the test data if no other tests are given."""
        data = self.data
        return run.compare(self.base, variants, data.train, data.valid, tests or {"": data.test}, self.training, after)


def character_model(run: Run, length: int | None = None, **model: Any) -> Setup:
    """A decoder on the characters of tiny Shakespeare."""
    data = characters(length or run.pick(32, 64))
    base = {"family": "decoder", "decoder_layers": run.pick(2, 3), "dim": run.pick(64, 96), "heads": 4}
    base |= {"vocab_size": data.vocab_size, "position": "rotary"}
    return Setup({**base, **model}, data, Training(run.pick(150, 500), 16, run.pick((1e-3, 4e-3), (1e-3, 3e-3))))


def translator(run: Run, **model: Any) -> tuple[Setup, Translation]:
    """An encoder-decoder on English-German pairs of Tatoeba, the paper's architecture in small."""
    translation = tatoeba(run.pick(20_000, 60_000), run.pick(12, 14), run.pick(1000, 2000))
    data = translation.data
    layers = run.pick(1, 2)
    base = {"family": "encoder-decoder", "encoder_layers": layers, "decoder_layers": layers}
    base |= {"dim": run.pick(64, 96), "heads": 4, "vocab_size": data.vocab_size, "tie": "all"}
    base |= {"scale_embedding": True, "norm_position": "pre", "init": "xavier"}
    training = Training(run.pick(150, 600), run.pick(32, 48), run.pick((2e-3, 6e-3), (1.5e-3, 4e-3)))
    return Setup({**base, **model}, data, training), translation


def translate(ensemble: Ensemble, translation: Translation, rows: int) -> list[list[str]]:
    """Translate test sentences greedily with the model of every seed."""
    data = {name: values[:rows] for name, values in translation.data.test.items()}
    length = data["ids"].shape[1]

    def run(forward: Forward, batch: Batch) -> torch.Tensor:
        return greedy(forward, batch, BEGIN, length)

    ids = ensemble.map(run, to_device(data, ensemble.device))
    return [translation.tokenizer.decode_batch([until_end(row) for row in member]) for member in ids.tolist()]


def bleu_after(run: Run, translation: Translation) -> Callable[[Ensemble], Mapping[str, Metrics]]:
    """Return a measurement for `compare`: BLEU of greedy translations of test sentences."""
    rows = run.pick(200, 300)

    def after(ensemble: Ensemble) -> Mapping[str, Metrics]:
        references = translation.references[:rows]
        return {"": {"bleu": [bleu(texts, references) for texts in translate(ensemble, translation, rows)]}}

    return after
