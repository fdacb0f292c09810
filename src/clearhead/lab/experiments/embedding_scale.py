"""Multiplying embeddings by √d before adding sinusoidal positions."""

from clearhead.lab.ensemble import Variant
from clearhead.lab.experiment import Experiment, Figure, Prediction, Results, Text
from clearhead.lab.runner import Run
from clearhead.lab.setups import translator


def measure(run: Run) -> Results:
    """Train with and without the factor, with embeddings tied to the output and with separate ones."""
    setup, _ = translator(run)
    variants = [
        Variant(f"{name}, tie {tie}", {"scale_embedding": scaled, "tie": tie})
        for tie in ("all", "none")
        for name, scaled in (("×√d", True), ("unscaled", False))
    ]
    return setup.compare(run, variants)


EXPERIMENT = Experiment(
    name="embedding-scale",
    title=Text("Embeddings times √d", "嵌入乘以 √d"),
    claim=Text("Without the factor √d the positions (±1) drown the embeddings (±1/√d).",
               "若不乘 √d，位置编码（±1）会淹没嵌入（±1/√d）。"),
    checklist=(96, 99),
    predictions=(
        Prediction(Text("Tied embeddings: unscaled has the higher loss", "共享嵌入：不缩放损失更高"),
                   "loss", "unscaled, tie all", "×√d, tie all", "higher", 0.02),
        Prediction(Text("Separate embeddings: unscaled has the higher loss", "独立嵌入：不缩放损失更高"),
                   "loss", "unscaled, tie none", "×√d, tie none", "higher", 0.02),
    ),
    measure=measure,
    figures=(Figure("loss", Text("Test loss", "测试损失")),),
    note=Text("Embeddings start with standard deviation 1/√d.", "嵌入的初始标准差为 1/√d。"),
    needs=("tatoeba_en_de",),
)  # fmt: skip
