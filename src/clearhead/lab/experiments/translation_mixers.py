"""Translation with attention, an LSTM or convolutions inside the layers."""

from clearhead.lab.ensemble import Variant
from clearhead.lab.experiment import Experiment, Figure, Prediction, Results, Text
from clearhead.lab.parts import Convolution, Nothing, Recurrence, replace_attention
from clearhead.lab.runner import Run
from clearhead.lab.setups import bleu_after, translator


def measure(run: Run) -> Results:
    """Replace self-attention only; cross-attention stays."""
    setup, translation = translator(run)
    variants = (
        Variant("attention"),
        Variant("LSTM", change=replace_attention(Recurrence)),
        Variant("convolution", change=replace_attention(Convolution)),
        Variant("cross-attention only", change=replace_attention(lambda dim: Nothing())),
    )
    return setup.compare(run, variants, after=bleu_after(run, translation))


EXPERIMENT = Experiment(
    name="translation-mixers",
    title=Text("Translation with and without self-attention", "有无自注意力的翻译"),
    claim=Text("Pure self-attention translates better than recurrent or convolutional layers.",
               "纯自注意力的翻译优于循环层和卷积层。"),
    checklist=(1, 33, 61, 94, 103, 111, 118),
    predictions=(
        Prediction(Text("Self-attention has a higher BLEU than an LSTM", "自注意力的 BLEU 高于 LSTM"),
                   "bleu", "attention", "LSTM", "higher", 1.0),
        Prediction(Text("Self-attention has a higher BLEU than convolutions", "自注意力的 BLEU 高于卷积"),
                   "bleu", "attention", "convolution", "higher", 1.0),
        Prediction(Text("Without any self-attention the loss is higher", "完全没有自注意力时损失更高"),
                   "loss", "cross-attention only", "attention", "higher", 0.05),
    ),
    measure=measure,
    figures=(Figure("bleu", Text("BLEU on Tatoeba", "Tatoeba 上的 BLEU")),),
    note=Text("Sentences of at most 14 tokens and minutes of training; cross-attention stays in every variant, and does most of the work.",
              "句子不超过 14 个 token，训练只有几分钟；所有变体都保留交叉注意力，大部分工作由它完成。"),
    papers=("Domhan 2018, ACL", "Tang et al. 2018, arXiv 1808.08946"),
    needs=("tatoeba_en_de",),
)  # fmt: skip
