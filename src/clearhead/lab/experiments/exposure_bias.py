"""Exposure bias: accuracy on the model's own history against the right one, by position and model size."""

import torch

from clearhead.lab.ensemble import Batch, Ensemble, Forward, Training, Variant, to_device
from clearhead.lab.experiment import Experiment, Figure, Prediction, Results, Text
from clearhead.lab.runner import Metrics, Run
from clearhead.lab.tasks import BEGIN, SPECIAL, Data, split

LENGTH, SYMBOLS = 10, 6


def running_sums(rows: int) -> Data:
    """Return sources of symbols and targets of their running sums: each answer depends on the one before."""
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(SYMBOLS, (rows, LENGTH), generator=generator)
    target = SPECIAL + source.cumsum(1) % SYMBOLS
    ids = torch.cat([torch.full((rows, 1), BEGIN), target[:, :-1]], 1)
    lengths = torch.full((rows,), LENGTH)
    batch = {"source": SPECIAL + source, "source_lengths": lengths, "ids": ids, "labels": target}
    return split(batch, SPECIAL + SYMBOLS, 256, 512)


def accuracies(forward: Forward, batch: Batch) -> torch.Tensor:
    """Accuracy at each position with the right history and with the own one: (2, T)."""
    labels, own = batch["labels"], batch["ids"]
    right = forward(batch).argmax(-1) == labels
    for position in range(labels.shape[1]):
        predicted = forward(batch | {"ids": own})[:, position].argmax(-1)
        own = torch.cat([own[:, : position + 1], predicted[:, None], own[:, position + 2 :]], 1)
    generated = torch.cat([own[:, 1 : labels.shape[1]], predicted[:, None]], 1)
    return torch.stack([right.float().mean(0), (generated == labels).float().mean(0)])


def measure(run: Run) -> Results:
    """Cells are "dim …|position"; the gap is right history minus own history."""
    data = running_sums(run.pick(4000, 20_000))
    test = to_device(data.test, run.device)

    def after(ensemble: Ensemble) -> dict[str, Metrics]:
        both = ensemble.map(accuracies, test)  # (S, 2, T)
        gap = both[:, 0] - both[:, 1]
        return {f"|{position}": {"gap": gap[:, position].tolist()} for position in range(LENGTH)}

    base = {"family": "encoder-decoder", "encoder_layers": 1, "decoder_layers": 2, "heads": 4}
    base |= {"vocab_size": data.vocab_size, "init": "xavier", "scale_embedding": True}
    training = Training(run.pick(300, 1000), 32, (3e-3, 1e-2))
    variants = [Variant(f"dim {dim}", {"dim": dim}) for dim in run.pick((16, 48), (16, 48, 128))]
    return run.compare(base, variants, data.train, data.valid, {"": data.test}, training, after)


EXPERIMENT = Experiment(
    name="exposure-bias",
    title=Text("Exposure bias", "曝光偏差"),
    claim=Text("Trained on right histories only, a model's errors pile up on its own history; scale suppresses this.",
               "模型训练时只见过正确历史，在自己生成的历史上错误会累积；规模能压住它。"),
    checklist=(25, 28),
    predictions=(
        Prediction(Text("Small model: the gap grows with the position", "小模型：差距随位置增大"),
                   "gap", "dim 16|9", "dim 16|1", "higher", 0.05),
        Prediction(Text("The larger model has the smaller gap at the end", "较大的模型末尾差距更小"),
                   "gap", "dim 48|9", "dim 16|9", "lower", 0.05),
    ),
    measure=measure,
    figures=(Figure("gap", Text("Accuracy lost on the own history", "在自己历史上损失的正确率"), Text("position", "位置")),),
    note=Text("Running sums: one wrong answer makes all later ones wrong, the worst case. A model that has not learned the task has little"
              " accuracy to lose, so its gap is small.",
              "累加任务：一步错，步步错，属于最坏情形。没学会任务的模型本来就没有多少准确率可丢，所以差距也小。"),
    papers=("He et al. 2021, arXiv 1905.10617",),
)  # fmt: skip
