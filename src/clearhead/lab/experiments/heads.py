"""The number of heads at equal width."""

from clearhead.lab.ensemble import Variant
from clearhead.lab.experiment import Experiment, Figure, Prediction, Results, Text
from clearhead.lab.runner import Run
from clearhead.lab.setups import character_model


def measure(run: Run) -> Results:
    """Cells are "heads|number"."""
    setup = character_model(run)
    return setup.compare(run, [Variant(f"heads|{heads}", {"heads": heads}) for heads in (1, 2, 4, 8, 16)])


EXPERIMENT = Experiment(
    name="heads",
    title=Text("Number of heads", "头的数量"),
    claim=Text("Several heads learn several patterns and are better than one; the exact number matters little.",
               "多个头学到多种模式，优于单头；具体数量影响不大。"),
    checklist=(50, 62, 64, 87, 88, 92, 146),
    predictions=(
        Prediction(Text("Four heads beat one", "4 个头优于 1 个"), "loss", "heads|4", "heads|1", "lower", 0.02),
        Prediction(Text("Eight heads are as good as four", "8 个头与 4 个相当"),
                   "loss", "heads|8", "heads|4", "same", 0.03),
        Prediction(Text("More heads at equal width bring no parameters", "宽度不变时，增加头数不增加参数"),
                   "parameters", "heads|16", "heads|1", "same", 0.5, exact=True),
    ),
    measure=measure,
    figures=(Figure("loss", Text("Test loss by number of heads", "不同头数的测试损失"), Text("heads", "头数"), log_x=True),),
    papers=("Vaswani et al. 2017, table 3 (A)", "Voita et al. 2019, arXiv 1905.09418"),
    needs=("tinyshakespeare",),
)  # fmt: skip
