"""Pre-norm against post-norm: by depth, and with and without warm-up."""

from clearhead.lab.ensemble import Training, Variant
from clearhead.lab.experiment import Experiment, Figure, Prediction, Results, Text
from clearhead.lab.runner import Run
from clearhead.lab.tasks import characters


def measure(run: Run) -> Results:
    """Train a character model at several depths; cells are "variant|layers"."""
    data = characters(run.pick(24, 64))
    base = {"family": "decoder", "dim": run.pick(32, 64), "heads": 4, "vocab_size": data.vocab_size, "init": "xavier"}
    training = Training(run.pick(150, 300), 16, (1e-3, 3e-3))
    results: Results = {}
    for layers in run.pick((2, 12), (2, 6, 12, 24)):
        variants = []
        for norm in ("pre", "post"):
            for warmup, suffix in ((0.1, ""), (0.0, ", no warm-up")):
                settings = {"decoder_layers": layers, "norm_position": norm}
                variants.append(Variant(f"{norm}{suffix}|{layers}", settings, warmup=warmup))
        results |= run.compare(base, variants, data.train, data.valid, {"": data.test}, training)
    return results


EXPERIMENT = Experiment(
    name="pre-norm",
    title=Text("Pre-norm and post-norm", "前置归一化与后置归一化"),
    claim=Text(
        "Pre-norm trains more stably than the paper's post-norm, above all in deep models.",
        "前置归一化（Pre-LN）比论文的后置归一化（Post-LN）训练更稳定，深层模型尤其如此。",
    ),
    checklist=(73, 74, 75, 76, 148),
    predictions=(
        Prediction(
            Text("12 layers, no warm-up: post-norm has the higher loss", "12 层、不预热：后置归一化的损失更高"),
            "loss", "post, no warm-up|12", "pre, no warm-up|12", "higher", 0.05,
        ),
        Prediction(
            Text("12 layers: post-norm needs the warm-up", "12 层：后置归一化离不开学习率预热"),
            "loss", "post, no warm-up|12", "post|12", "higher", 0.05,
        ),
        Prediction(
            Text("12 layers: pre-norm does not need it", "12 层：前置归一化不需要预热"),
            "loss", "pre, no warm-up|12", "pre|12", "same", 0.05,
        ),
        Prediction(
            Text("2 layers: post-norm is as good", "2 层：后置归一化同样好"),
            "loss", "post|2", "pre|2", "same", 0.05,
        ),
    ),
    measure=measure,
    figures=(Figure("loss", Text("Test loss by number of layers", "不同层数的测试损失"), Text("layers", "层数")),),
    note=Text("In the quick size, post-norm with 12 layers learns nothing but the frequency of the letters, with or without warm-up;"
              " the steps are too few to show what warm-up does.",
              "快速规模下，12 层的后置归一化无论是否预热，都只学到了字母的频率；步数太少，看不出预热的作用。"),
    papers=("Xiong et al. 2020, arXiv 2002.04745", "Takase et al. 2022, arXiv 2206.00330"),
    needs=("tinyshakespeare",),
)  # fmt: skip
