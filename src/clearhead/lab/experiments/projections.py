"""Without separate query, key and value projections."""

from clearhead.lab.ensemble import Variant
from clearhead.lab.experiment import Experiment, Figure, Prediction, Results, Text
from clearhead.lab.parts import SharedKeyValue, SharedQueryKey, WithoutProjections, swap
from clearhead.lab.runner import Run
from clearhead.lab.setups import character_model
from clearhead.model.attention import Attention


def measure(run: Run) -> Results:
    """Share or leave out projections; unused ones are not trained."""
    variants = (
        Variant("Q, K, V"),
        Variant("Q = K", change=swap(Attention, SharedQueryKey)),
        Variant("K = V", change=swap(Attention, SharedKeyValue)),
        Variant("none", change=swap(Attention, WithoutProjections)),
    )
    return character_model(run).compare(run, variants)


EXPERIMENT = Experiment(
    name="projections",
    title=Text("Query, key and value projections", "查询、键、值投影"),
    claim=Text("Without three projections attention knows only overall similarity and cannot ask for something.",
               "没有三个投影，注意力只知道整体相似度，无法“提问”。"),
    checklist=(36, 37, 38, 39, 40, 41, 42, 44, 46, 82, 90, 91, 92, 134, 136, 137, 138),
    predictions=(
        Prediction(Text("No projections: the loss is higher", "不做投影：损失更高"), "loss", "none", "Q, K, V", "higher", 0.05),
        Prediction(Text("Q = K: the loss is higher", "Q = K：损失更高"), "loss", "Q = K", "Q, K, V", "higher", 0.02),
        Prediction(Text("K = V: the loss is no different", "K = V：损失没有差别"), "loss", "K = V", "Q, K, V", "same", 0.03),
    ),
    measure=measure,
    figures=(Figure("loss", Text("Test loss", "测试损失")),),
    note=Text("The output projection stays in every variant.", "各变体都保留输出投影。"),
    papers=("arXiv 2606.04032",),
    needs=("tinyshakespeare",),
)  # fmt: skip
