"""Without residual connections, by depth."""

from clearhead.lab.ensemble import Variant
from clearhead.lab.experiment import Experiment, Figure, Prediction, Results, Text
from clearhead.lab.parts import WithoutResidual, swap
from clearhead.lab.runner import Run
from clearhead.lab.setups import character_model
from clearhead.model.layer import Layer


def measure(run: Run) -> Results:
    """Cells are "variant|layers"."""
    variants = []
    for layers in (1, 2, 4, 6):
        settings = {"decoder_layers": layers, "dim": 48, "init": "xavier"}
        variants.append(Variant(f"residual|{layers}", settings))
        variants.append(Variant(f"no residual|{layers}", settings, change=swap(Layer, WithoutResidual)))
    return character_model(run).compare(run, variants)


EXPERIMENT = Experiment(
    name="residual",
    title=Text("Residual connections", "残差连接"),
    claim=Text("Residual connections keep deep networks from degrading.", "残差连接防止深层网络退化。"),
    checklist=(16,),
    predictions=(
        Prediction(Text("6 layers: without residuals the loss is much higher", "6 层：去掉残差后损失高得多"),
                   "loss", "no residual|6", "residual|6", "higher", 0.3),
        Prediction(Text("Without residuals, 6 layers are worse than 2", "没有残差时，6 层不如 2 层"),
                   "loss", "no residual|6", "no residual|2", "higher", 0.05),
        Prediction(Text("With residuals, 6 layers are no worse than 2", "有残差时，6 层不差于 2 层"),
                   "loss", "residual|6", "residual|2", "lower", 0.01),
    ),
    measure=measure,
    figures=(Figure("loss", Text("Test loss by depth", "不同层数的测试损失"), Text("layers", "层数")),),
    papers=("He et al. 2016, arXiv 1512.03385", "Dong et al. 2021, arXiv 2103.03404"),
    needs=("tinyshakespeare",),
)  # fmt: skip
