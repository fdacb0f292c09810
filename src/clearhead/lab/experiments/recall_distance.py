"""Recall of a symbol by its distance: attention, an LSTM and convolutions."""

from clearhead.lab.ensemble import Training, Variant
from clearhead.lab.experiment import Experiment, Figure, Prediction, Results, Text
from clearhead.lab.parts import Convolution, Recurrence, replace_attention
from clearhead.lab.runner import Run
from clearhead.lab.tasks import copying


def measure(run: Run) -> Results:
    """Copy `length` random symbols; only the mixing of tokens differs. Cells are "mixer|length"."""
    results: Results = {}
    for length in run.pick((4, 8, 16), (8, 16, 32)):
        data = copying(length, run.pick(6000, 20_000))
        base = {"family": "decoder", "decoder_layers": 2, "dim": run.pick(48, 64), "heads": 4}
        base |= {"vocab_size": data.vocab_size, "position": "rotary"}
        training = Training(run.pick(250, 600), run.pick(16, 32), (2e-3, 6e-3))
        variants = (
            Variant(f"attention|{length}"),
            Variant(f"LSTM|{length}", change=replace_attention(Recurrence)),
            Variant(f"convolution|{length}", change=replace_attention(Convolution)),
        )
        results |= run.compare(base, variants, data.train, data.valid, {"": data.test}, training)
    return results


EXPERIMENT = Experiment(
    name="recall-distance",
    title=Text("Recall by distance", "按距离回忆"),
    claim=Text(
        "Recurrent networks lose what lies far back, convolutions see only their field; attention reaches any position.",
        "循环网络会丢失很久以前的内容，卷积只看得到感受野之内；注意力可以直达任意位置。",
    ),
    checklist=(29, 31, 32, 33, 112, 145),
    predictions=(
        Prediction(
            Text("16 tokens back: attention is more accurate than an LSTM", "相距 16 个 token：注意力比 LSTM 准确"),
            "accuracy", "attention|16", "LSTM|16", "higher", 0.2,
        ),
        Prediction(
            Text("16 tokens back: attention is more accurate than convolutions", "相距 16 个 token：注意力比卷积准确"),
            "accuracy", "attention|16", "convolution|16", "higher", 0.2,
        ),
        Prediction(
            Text("The LSTM is less accurate at 16 than at 8 tokens", "LSTM 在 16 处不如在 8 处准确"),
            "accuracy", "LSTM|16", "LSTM|8", "lower", 0.05,
        ),
    ),
    measure=measure,
    figures=(
        Figure("accuracy", Text("Recalled symbols by distance", "不同距离的回忆正确率"), Text("tokens", "token 数")),
    ),
    note=Text("Copying random symbols, 2 layers; two convolutions of size 3 see 5 tokens.",
              "复制随机符号，2 层；两层大小为 3 的卷积只能看到 5 个 token。"),
    papers=("Tang et al. 2018, arXiv 1808.08946",),
)  # fmt: skip
