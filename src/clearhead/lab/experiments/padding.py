"""Padding tokens with and without the padding mask."""

from torch.nn import functional as F

from clearhead.lab.ensemble import Batch, Variant
from clearhead.lab.experiment import Experiment, Figure, Prediction, Results, Text
from clearhead.lab.parts import PaddingBlindAttention, swap
from clearhead.lab.runner import Run
from clearhead.lab.setups import translator
from clearhead.model.attention import Attention


def longer(batch: Batch, tokens: int) -> Batch:
    """Add padding to the sources."""
    return batch | {"source": F.pad(batch["source"], (0, tokens))}


def measure(run: Run) -> Results:
    """Train translators, test with the usual padding and with 40 more padding tokens."""
    setup, _ = translator(run)
    tests = {"as trained": setup.data.test, "more padding": longer(setup.data.test, 40)}
    variants = (Variant("mask"), Variant("no mask", change=swap(Attention, PaddingBlindAttention)))
    return setup.compare(run, variants, tests)


EXPERIMENT = Experiment(
    name="padding",
    title=Text("The padding mask", "填充掩码"),
    claim=Text("Padding must not take part in attention, or the other sentences of a batch change a result.",
               "填充不能参与注意力，否则同一批里的其他句子会改变结果。"),
    checklist=(11, 54, 61, 71),
    predictions=(
        Prediction(Text("With the mask, more padding changes nothing", "有掩码时，多加填充毫无影响"),
                   "loss", "mask|more padding", "mask|as trained", "same", 1e-4),
        Prediction(Text("Without it, more padding raises the loss", "没有掩码时，多加填充使损失上升"),
                   "loss", "no mask|more padding", "no mask|as trained", "higher", 0.1),
        Prediction(Text("As trained, the model learns to ignore padding by itself", "与训练时相同的填充下，模型自己学会忽略它"),
                   "loss", "no mask|as trained", "mask|as trained", "same", 0.05),
    ),
    measure=measure,
    figures=(Figure("loss", Text("Test loss", "测试损失")),),
    needs=("tatoeba_en_de",),
)  # fmt: skip
