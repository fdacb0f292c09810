"""Sharing the embedding matrices of encoder, decoder and output."""

from clearhead.lab.ensemble import Variant
from clearhead.lab.experiment import Experiment, Figure, Prediction, Results, Text
from clearhead.lab.runner import Run
from clearhead.lab.setups import bleu_after, translator


def measure(run: Run) -> Results:
    """Train with none, the output, and all matrices tied."""
    setup, translation = translator(run)
    variants = [Variant(f"tie {tie}", {"tie": tie}) for tie in ("none", "output", "all")]
    return setup.compare(run, variants, after=bleu_after(run, translation))


EXPERIMENT = Experiment(
    name="tying",
    title=Text("Sharing embeddings", "共享嵌入"),
    claim=Text("One matrix for both embeddings and the output saves parameters and costs no quality.",
               "两个嵌入和输出层共用一个矩阵，省参数而不损失质量。"),
    checklist=(97, 98),
    predictions=(
        Prediction(Text("Tied, the model has under 60% of the parameters", "共享后参数不到 60%"),
                   "parameters", "tie all", "tie none", "lower", 0.4, relative=True, exact=True),
        Prediction(Text("Tied, the loss is no different", "共享后损失没有差别"), "loss", "tie all", "tie none", "same", 0.05),
        Prediction(Text("Tied, the BLEU is no different", "共享后 BLEU 没有差别"), "bleu", "tie all", "tie none", "same", 1.5),
    ),
    measure=measure,
    figures=(Figure("loss", Text("Test loss", "测试损失")), Figure("parameters", Text("Parameters", "参数量"))),
    papers=("Press and Wolf 2017, arXiv 1608.05859",),
    needs=("tatoeba_en_de",),
)  # fmt: skip
