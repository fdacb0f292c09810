"""LayerNorm per token or over all tokens of a sample: the latter leaks the future."""

from clearhead.lab.ensemble import Ensemble, Variant
from clearhead.lab.experiment import Experiment, Figure, Prediction, Results, Text
from clearhead.lab.experiments.mask_order import change_of_the_past
from clearhead.lab.parts import SampleNorm, swap
from clearhead.lab.runner import Metrics, Run
from clearhead.lab.setups import character_model
from clearhead.lab.tasks import prefixes
from clearhead.model.norms import LayerNorm


def measure(run: Run) -> Results:
    """Test on whole rows and on last positions, and measure what later tokens change."""
    setup = character_model(run)
    variants = (Variant("per token"), Variant("per sample", change=swap(LayerNorm, SampleNorm)))
    tests = {"whole rows": setup.data.test, "last positions": prefixes(setup.data.test)}

    def after(ensemble: Ensemble) -> dict[str, Metrics]:
        return {"|whole rows": {"leak": change_of_the_past(ensemble, setup.data.test)}}

    return setup.compare(run, variants, tests, after)


EXPERIMENT = Experiment(
    name="norm-axis",
    title=Text("What LayerNorm averages over", "LayerNorm 在哪些值上求平均"),
    claim=Text("LayerNorm in a Transformer takes the statistics of each token; over a whole sample it would see the future.",
               "Transformer 里的 LayerNorm 按单个 token 统计；若对整个样本统计，就会看到未来。"),
    checklist=(8, 66, 67, 68, 79),
    predictions=(
        Prediction(Text("Per token, later tokens change nothing", "按 token：后文不影响前文"),
                   "leak", "per token|whole rows", 0.0, "same", 1e-4),
        Prediction(Text("Per sample, later tokens change earlier logits", "按样本：后文会改变前文的 logits"),
                   "leak", "per sample|whole rows", "per token|whole rows", "higher", 1e-2),
        Prediction(Text("Per sample has the higher loss", "按样本的损失更高"),
                   "loss", "per sample|whole rows", "per token|whole rows", "higher", 0.02),
    ),
    measure=measure,
    figures=(Figure("loss", Text("Test loss", "测试损失")),
             Figure("leak", Text("Change of earlier logits when later tokens change", "后文改变时前文 logits 的变化"))),
    needs=("tinyshakespeare",),
)  # fmt: skip
