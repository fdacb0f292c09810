"""Masked-language-model pretraining against training from scratch, by number of labels."""

from clearhead.config import ModelConfig
from clearhead.lab.ensemble import Ensemble, Training, Variant
from clearhead.lab.experiment import Experiment, Figure, Prediction, Results, Text
from clearhead.lab.runner import Run
from clearhead.lab.tasks import Data, labeled, masked

LABELS = (100, 1000)


def fine_tune(run: Run, ensemble: Ensemble, data: Data, labels: int, name: str) -> Results:
    """Train an ensemble on the first `labels` examples, keep the best learning rate, test."""
    import torch

    lrs = (3e-4, 1e-3, 3e-3)
    few = {key: values[:labels] for key, values in data.train.items()}
    steps = run.steps(run.pick(60, 150))
    ensemble.train(few, Training(steps, 16, lrs), Variant(name), run.seeds)
    losses = torch.tensor(ensemble.evaluate(data.valid)["loss"]).view(len(lrs), -1).mean(1)
    ensemble.select(int(losses.argmin()))
    return {f"{name}|{labels}": ensemble.evaluate(data.test)}


def measure(run: Run) -> Results:
    """Pretrain on all sentences without labels, fine-tune on few of them."""
    data, _ = labeled("sst2", 1000, 24)
    mask = data.vocab_size
    config = ModelConfig(family="encoder", encoder_layers=2, dim=64, heads=4, vocab_size=mask + 1, tie="output",
                         norm_position="pre", init="xavier", scale_embedding=True, dropout=0.1)  # fmt: skip
    results: Results = {}
    for pretrained in (False, True):
        name = "pretrained" if pretrained else "from scratch"

        def part(name: str = name, pretrained: bool = pretrained) -> Results:
            cells: Results = {}
            for labels in LABELS:
                ensemble = Ensemble(config, Variant(name), run.seeds, run.device)
                if pretrained:
                    training = Training(run.steps(run.pick(300, 1500)), run.pick(32, 64), (3e-3,))
                    ensemble.train(masked(data.train, mask), training, Variant(name), run.seeds)
                cells |= fine_tune(run, ensemble, data, labels, name)
            return cells

        results |= run.part(name, part)
    return results


EXPERIMENT = Experiment(
    name="pretraining",
    title=Text("Pretraining and fine-tuning", "预训练与微调"),
    claim=Text("After pretraining on plain text, few labels are enough.", "在无标注文本上预训练之后，少量标注就够了。"),
    checklist=(119, 121),
    predictions=(
        Prediction(Text("100 labels: pretraining is more accurate", "100 个标注：预训练更准确"),
                   "accuracy", "pretrained|100", "from scratch|100", "higher", 0.03),
        Prediction(Text("1,000 labels: still more accurate", "1000 个标注：仍然更准确"),
                   "accuracy", "pretrained|1000", "from scratch|1000", "higher", 0.02),
    ),
    measure=measure,
    figures=(Figure("accuracy", Text("Accuracy by number of labels", "不同标注量的准确率"), Text("labels", "标注数"), log_x=True),),
    note=Text("A small encoder, pretrained briefly on film reviews. The label is read at the first position, which the masked language model leaves untrained.", "小型编码器，只在影评上短暂预训练。标签从第一个位置读出，而掩码语言模型没有训练这个位置。"),
    papers=("Radford et al. 2018, table 5", "Devlin et al. 2019"),
    needs=("sst2",),
)  # fmt: skip
