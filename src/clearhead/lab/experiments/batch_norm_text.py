"""LayerNorm against BatchNorm on sentences of ragged length, with large and small batches."""

from clearhead.lab.ensemble import Variant
from clearhead.lab.experiment import Experiment, Figure, Prediction, Results, Text
from clearhead.lab.parts import PaddedBatchNorm, swap
from clearhead.lab.runner import Run
from clearhead.lab.setups import translator
from clearhead.model.norms import BatchNorm


def measure(run: Run) -> Results:
    """Cells are "norm|batch size"; norms are compared at equal batch size and equal steps."""
    setup, _ = translator(run)
    results: Results = {}
    for batch in (setup.training.batch, 4):
        steps = min(setup.training.steps * setup.training.batch // batch, run.pick(300, 1200))
        variants = (
            Variant(f"LayerNorm|{batch}"),
            Variant(f"BatchNorm|{batch}", {"norm": "batch"}),
            Variant(f"BatchNorm over padding|{batch}", {"norm": "batch"}, change=swap(BatchNorm, PaddedBatchNorm)),
        )
        training = type(setup.training)(steps, batch, setup.training.lrs)
        results |= setup._replace(training=training).compare(run, variants)
    names = {"large": setup.training.batch, "small": 4}
    for size, batch in names.items():
        results |= {f"{norm}, {size}": results[f"{norm}|{batch}"] for norm in ("LayerNorm", "BatchNorm")}
    results["BatchNorm over padding, large"] = results[f"BatchNorm over padding|{names['large']}"]
    return results


EXPERIMENT = Experiment(
    name="batch-norm-text",
    title=Text("LayerNorm and BatchNorm on text", "文本上的 LayerNorm 与 BatchNorm"),
    claim=Text("On sentences of different length, and above all in small batches, BatchNorm is worse than LayerNorm.",
               "句子长短不一时，尤其批量较小时，BatchNorm 不如 LayerNorm。"),
    checklist=(3, 4, 5, 6, 11, 12, 69, 70, 71, 72, 78, 80, 81),
    predictions=(
        Prediction(Text("Usual batch: BatchNorm has the higher loss", "正常批量：BatchNorm 损失更高"),
                   "loss", "BatchNorm, large", "LayerNorm, large", "higher", 0.05),
        Prediction(Text("Batch of 4: BatchNorm has the higher loss", "批量为 4：BatchNorm 损失更高"),
                   "loss", "BatchNorm, small", "LayerNorm, small", "higher", 0.1),
        Prediction(Text("Counting padding makes BatchNorm worse", "把填充计入统计会让 BatchNorm 更差"),
                   "loss", "BatchNorm over padding, large", "BatchNorm, large", "higher", 0.05),
    ),
    measure=measure,
    figures=(Figure("loss", Text("Test loss by batch size", "不同批量的测试损失"), Text("batch size", "批量"),
                    only=("LayerNorm", "BatchNorm", "BatchNorm over padding"), log_x=True),),
    note=Text("A small translator; statistics are stored while training, as in torch.", "小型翻译模型；训练时累积统计量，与 torch 相同。"),
    papers=("Shen et al. 2020, arXiv 2003.07845", "Wang et al. 2022"),
    needs=("tatoeba_en_de",),
)  # fmt: skip
