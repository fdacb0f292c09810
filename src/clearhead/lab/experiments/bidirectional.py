"""A bidirectional encoder against a causal decoder for understanding: entity tags of each word."""

import torch

from clearhead.lab.ensemble import Training, Variant
from clearhead.lab.experiment import Experiment, Figure, Prediction, Results, Text
from clearhead.lab.runner import Run
from clearhead.lab.tasks import tagged


def measure(run: Run) -> Results:
    """Predict the tag of each word with and without the words to its right; the sizes are equal."""
    data, tags = tagged(3000)
    entities = dict(data.test)
    entities["labels"] = torch.where(entities["labels"] == tags.index("O"), -100, entities["labels"])
    base = {
        "dim": 64,
        "heads": 4,
        "vocab_size": data.vocab_size,
        "init": "xavier",
        "scale_embedding": True,
        "dropout": 0.1,
    }
    layers = run.pick(2, 4)
    variants = (
        Variant("bidirectional", {"family": "decoder", "decoder_layers": layers}, change=_see_all),
        Variant("causal", {"family": "decoder", "decoder_layers": layers}),
    )
    training = Training(run.pick(150, 500), 32, (1e-3, 3e-3))
    return run.compare(base, variants, data.train, data.valid, {"all words": data.test, "names": entities}, training)


def _see_all(network: torch.nn.Module) -> None:
    """Make the stack bidirectional; everything else stays equal."""
    network.decoder.causal = False  # type: ignore[union-attr]


EXPERIMENT = Experiment(
    name="bidirectional",
    title=Text("Bidirectional and causal reading", "双向与单向"),
    claim=Text("For understanding, a model that sees both sides is far better than one that sees the left only.",
               "在理解任务上，能看到左右两侧的模型远好于只看左侧的模型。"),
    checklist=(13, 14, 114, 119, 120),
    predictions=(
        Prediction(Text("Bidirectional: more accurate on names", "双向：人名地名等实体的准确率更高"),
                   "accuracy", "bidirectional|names", "causal|names", "higher", 0.03),
        Prediction(Text("Bidirectional: lower loss on all words", "双向：全部词上的损失更低"),
                   "loss", "bidirectional|all words", "causal|all words", "lower", 0.02),
    ),
    measure=measure,
    figures=(Figure("accuracy", Text("Accuracy of entity tags", "实体标注的准确率")),),
    note=Text("Trained from scratch on CoNLL-2003, without pretraining.", "在 CoNLL-2003 上从零训练，没有预训练。"),
    papers=("Devlin et al. 2019, table 5", "arXiv 2507.00994"),
    needs=("conll2003_en",),
)  # fmt: skip
