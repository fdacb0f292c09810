"""Bag of words, word2vec, BERT, an encoder without positions, and an encoder: where order matters, and where not."""

import torch
from torch import nn

from clearhead import load
from clearhead.lab.ensemble import Batch, Training, Variant
from clearhead.lab.experiment import Experiment, Figure, Prediction, Results, Text
from clearhead.lab.parts import BagOfWords, word2vec
from clearhead.lab.runner import Run
from clearhead.lab.tasks import labeled, labeled_tokenizer, shuffled_or_not

VOCAB, DIM = 1000, 64


def measure(run: Run) -> Results:
    """Two tasks on the same sentences (TREC questions): the topic, and whether the words are in order."""
    topics, names = labeled("trec_qc", VOCAB, 16)
    tasks = {"topic": topics, "order": shuffled_or_not(topics.train, topics.vocab_size)}
    size, lrs = topics.vocab_size, (1e-2, 5e-2)
    base = {"family": "encoder", "encoder_layers": 2, "dim": DIM, "heads": 4, "vocab_size": size, "dropout": 0.1}
    base |= {"norm_position": "pre", "init": "xavier", "scale_embedding": True, "position": "sinusoidal"}
    training = Training(run.pick(150, 500), 32, (1e-3, 3e-3))

    def bert(batch: Batch) -> Batch:
        """The vectors of novels-bert for the sentences, in place of their tokens."""
        rows = zip(batch["ids"].tolist(), batch["lengths"].tolist(), strict=True)
        texts = labeled_tokenizer("trec_qc", VOCAB).decode_batch([row[1:length] for row, length in rows])
        vectors = load("novels-bert", device=run.device).embed(texts)
        return {"ids": torch.from_numpy(vectors)[:, None], "labels": batch["labels"][:, :1]}

    def probe(task: str) -> Results:
        train, valid, test = (bert(batch) for batch in tasks[task][:3])
        linear = Variant(f"{task}: BERT", build=lambda: nn.Linear(train["ids"].shape[-1], len(names)), lrs=lrs)
        return run.train({}, linear, train, valid, {"": test}, training)

    results: Results = {}
    for task, data in tasks.items():
        vectors = word2vec(data.train, size, DIM)
        variants = (
            Variant(f"{task}: bag of words", build=lambda: BagOfWords(size, DIM, len(names)), lrs=lrs),
            Variant(f"{task}: word2vec", build=lambda v=vectors: BagOfWords(size, DIM, len(names), v), lrs=lrs),  # type: ignore[misc]
            Variant(f"{task}: no positions", {"position": "none"}),
            Variant(f"{task}: encoder"),
        )
        results |= run.compare(base, variants, data.train, data.valid, {"": data.test}, training)
        results |= run.part(f"{task}: BERT", lambda task=task: probe(task))  # type: ignore[misc]
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
    note=Text("BERT: a linear classifier on the vectors of novels-bert, which is not trained further; word2vec: fixed vectors from the same sentences.",
              "BERT：在 novels-bert 的句向量上接线性分类器，不再训练 BERT 本身；word2vec：在同一批句子上训练好后固定不变的词向量。"),
    needs=("trec_qc",),
)  # fmt: skip
