"""Training without the causal mask: a low loss that is worth nothing when generating."""

from clearhead.lab.ensemble import Variant
from clearhead.lab.experiment import Experiment, Figure, Prediction, Results, Text
from clearhead.lab.parts import LookAheadAttention, swap
from clearhead.lab.runner import Run
from clearhead.lab.setups import character_model
from clearhead.lab.tasks import prefixes
from clearhead.model.attention import Attention


def measure(run: Run) -> Results:
    """Test with the whole row visible, and at the last position of each row, as in generation."""
    setup = character_model(run)
    variants = (Variant("causal mask"), Variant("no mask", change=swap(Attention, LookAheadAttention)))
    return setup.compare(run, variants, {"in training": setup.data.test, "generating": prefixes(setup.data.test)})


EXPERIMENT = Experiment(
    name="look-ahead",
    title=Text("The look-ahead mask", "前瞻掩码"),
    claim=Text("Without the mask a decoder copies the next token from its input and learns nothing of use.",
               "没有掩码，解码器会直接从输入里抄下一个 token，学不到有用的东西。"),
    checklist=(19, 20, 21, 51, 54, 93, 114, 115),
    predictions=(
        Prediction(Text("Unmasked, the training loss looks far better", "不加掩码，训练时的损失看起来好得多"),
                   "loss", "no mask|in training", "causal mask|in training", "lower", 0.5),
        Prediction(Text("Unmasked, generating is far worse", "不加掩码，生成时差得多"),
                   "loss", "no mask|generating", "causal mask|generating", "higher", 0.5),
    ),
    measure=measure,
    figures=(Figure("loss", Text("Loss when the future is visible, and when it is not", "看得到未来与看不到未来时的损失")),),
    needs=("tinyshakespeare",),
)  # fmt: skip
