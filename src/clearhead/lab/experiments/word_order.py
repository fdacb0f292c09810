"""Bag of words, an encoder without positions, and an encoder: where order matters, and where it does not."""

import torch

from clearhead.lab.ensemble import IGNORE, Batch, Training, Variant
from clearhead.lab.experiment import Experiment, Figure, Prediction, Results, Text
from clearhead.lab.parts import BagOfWords
from clearhead.lab.runner import Run
from clearhead.lab.tasks import Data, labeled, split


def shuffled_or_not(batch: Batch, vocab_size: int) -> Data:
    """Return the same sentences with the words of every second one shuffled; the label says which."""
    generator = torch.Generator().manual_seed(0)
    ids, lengths = batch["ids"].clone(), batch["lengths"]
    for row in range(0, len(ids), 2):
        order = 1 + torch.randperm(int(lengths[row]) - 1, generator=generator)
        ids[row, 1 : lengths[row]] = ids[row, order]
    labels = torch.full_like(ids, IGNORE)
    labels[:, 0] = torch.arange(len(ids)) % 2
    return split({"ids": ids, "lengths": lengths, "labels": labels}, vocab_size)


def measure(run: Run) -> Results:
    """Two tasks on the same sentences (TREC questions): the topic, and whether the words are in order."""
    topics, names = labeled("trec_qc", 1000, 16)
    results: Results = {}
    tasks = (("topic", topics), ("order", shuffled_or_not(topics.train, topics.vocab_size)))
    base = {
        "family": "encoder",
        "encoder_layers": 2,
        "dim": 64,
        "heads": 4,
        "vocab_size": topics.vocab_size,
        "norm_position": "pre",
    }
    base |= {"init": "xavier", "scale_embedding": True, "position": "sinusoidal", "dropout": 0.1}
    for task, data in tasks:
        variants = (
            Variant(
                f"{task}: bag of words", build=lambda: BagOfWords(topics.vocab_size, 64, len(names)), lrs=(1e-2, 5e-2)
            ),
            Variant(f"{task}: no positions", {"position": "none"}),
            Variant(f"{task}: encoder"),
        )
        training = Training(run.pick(150, 500), 32, (1e-3, 3e-3))
        results |= run.compare(base, variants, data.train, data.valid, {"": data.test}, training)
    return results


EXPERIMENT = Experiment(
    name="word-order",
    title=Text("Word order", "词序"),
    claim=Text("A bag of words ignores order; attention with positions reads it.", "词袋忽略词序；带位置编码的注意力能读出词序。"),
    checklist=(35, 104, 105, 106, 109, 113),
    predictions=(
        Prediction(Text("Order: the bag guesses", "词序任务：词袋只能瞎猜"), "accuracy", "order: bag of words", 0.5, "same", 0.05),
        Prediction(Text("Order: so does attention without positions", "词序任务：没有位置编码的注意力也一样"),
                   "accuracy", "order: no positions", 0.5, "same", 0.05),
        Prediction(Text("Order: the encoder is far better", "词序任务：编码器好得多"),
                   "accuracy", "order: encoder", "order: bag of words", "higher", 0.15),
        Prediction(Text("Topic: the bag is about as good", "主题任务：词袋大致一样好"),
                   "accuracy", "topic: bag of words", "topic: encoder", "same", 0.04),
    ),
    measure=measure,
    figures=(Figure("accuracy", Text("Accuracy", "准确率")),),
    needs=("trec_qc",),
)  # fmt: skip
