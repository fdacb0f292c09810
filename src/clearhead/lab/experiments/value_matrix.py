"""A full value matrix for each head against value-down and value-up."""

from clearhead.lab.ensemble import Variant
from clearhead.lab.experiment import Experiment, Figure, Prediction, Results, Text
from clearhead.lab.parts import full_value
from clearhead.lab.runner import Run
from clearhead.lab.setups import character_model


def measure(run: Run) -> Results:
    """Train both; arithmetic for GPT-3's sizes."""
    results: Results = character_model(run).compare(run, [Variant("factored"), Variant("full", change=full_value)])
    dim, head = 12_288, 128  # GPT-3
    results["GPT-3"] = {"full value over key and query": [dim * dim / (2 * dim * head)] * len(run.seeds)}
    return results


EXPERIMENT = Experiment(
    name="value-matrix",
    title=Text("Factoring the value matrix", "分解值矩阵"),
    claim=Text("A full value matrix is many times larger than key and query together; its low-rank factors do as well.",
               "完整的值矩阵比键和查询矩阵之和大许多倍；低秩分解效果同样好。"),
    checklist=(43, 57, 58, 59, 65),
    predictions=(
        Prediction(Text("GPT-3: a full value matrix would be 48 times key plus query", "GPT-3：完整值矩阵是键加查询的 48 倍"),
                   "full value over key and query", "GPT-3", 48.0, "same", 0.5, exact=True),
        Prediction(Text("The factored model has fewer parameters", "分解后的模型参数更少"),
                   "parameters", "factored", "full", "lower", 0.1, relative=True, exact=True),
        Prediction(Text("Its loss is no different", "损失没有差别"), "loss", "factored", "full", "same", 0.03),
    ),
    measure=measure,
    figures=(Figure("loss", Text("Test loss", "测试损失")), Figure("parameters", Text("Parameters", "参数量"))),
    needs=("tinyshakespeare",),
)  # fmt: skip
