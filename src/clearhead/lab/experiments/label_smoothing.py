"""Label smoothing: loss, BLEU and calibration."""

import torch

from clearhead.lab.ensemble import IGNORE, Batch, Ensemble, Forward, Variant, to_device
from clearhead.lab.experiment import Experiment, Figure, Prediction, Results, Text
from clearhead.lab.runner import Metrics, Run
from clearhead.lab.setups import bleu_after, translator

BINS = 10


def calibration_error(forward: Forward, batch: Batch) -> torch.Tensor:
    """Expected calibration error: |confidence - accuracy| averaged over ten bins of confidence."""
    probability, token = forward(batch).softmax(-1).max(-1)
    counted = batch["labels"] != IGNORE
    bins = torch.arange(BINS, device=token.device)[:, None, None]
    inside = ((probability * BINS).long().clamp(max=BINS - 1) == bins) & counted  # (bins, B, T)
    gap = (probability - (token == batch["labels"]).float()) * inside
    return gap.sum((1, 2)).abs().sum() / counted.sum()


def measure(run: Run) -> Results:
    """Train with ε = 0, 0.1 and 0.3."""
    setup, translation = translator(run)
    bleu = bleu_after(run, translation)
    test = to_device({name: values[:256] for name, values in setup.data.test.items()}, run.device)

    def after(ensemble: Ensemble) -> dict[str, Metrics]:
        return {"": {**bleu(ensemble)[""], "calibration error": ensemble.map(calibration_error, test).tolist()}}

    variants = [Variant(f"ε|{epsilon:g}", label_smoothing=epsilon) for epsilon in (0.0, 0.1, 0.3)]
    return setup.compare(run, variants, after=after)


EXPERIMENT = Experiment(
    name="label-smoothing",
    title=Text("Label smoothing", "标签平滑"),
    claim=Text("Label smoothing makes a model less over-confident and generalize better.", "标签平滑避免过度自信，提升泛化能力。"),
    checklist=(101, 102),
    predictions=(
        Prediction(Text("The loss on the true labels is higher", "真实标签上的损失更高"), "loss", "ε|0.1", "ε|0", "higher", 0.02),
        Prediction(Text("BLEU is higher", "BLEU 更高"), "bleu", "ε|0.1", "ε|0", "higher", 0.5),
        Prediction(Text("The calibration error is lower", "校准误差更低"),
                   "calibration error", "ε|0.1", "ε|0", "lower", 0.01),
    ),
    measure=measure,
    figures=tuple(Figure(metric, title, Text("ε", "ε")) for metric, title in (
        ("loss", Text("Test loss", "测试损失")), ("bleu", Text("BLEU", "BLEU")),
        ("calibration error", Text("Calibration error", "校准误差")))),
    note=Text("Short training: a model that has not overfit is not over-confident yet.", "训练很短：尚未过拟合的模型还谈不上过度自信。"),
    papers=("Vaswani et al. 2017, table 3 (D)", "Müller et al. 2019, arXiv 1906.02629"),
    needs=("tatoeba_en_de",),
)  # fmt: skip
