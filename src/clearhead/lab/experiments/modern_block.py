"""The block of 2017 against that of 2024, at equal compute."""

from clearhead.lab.ensemble import Variant
from clearhead.lab.experiment import Experiment, Figure, Prediction, Results, Text
from clearhead.lab.runner import Run
from clearhead.lab.setups import character_model

MODERN = {
    "norm_position": "pre",
    "norm": "rms",
    "activation": "swiglu",
    "position": "rotary",
    "bias": False,
    "kv_heads": 2,
}


def measure(run: Run) -> Results:
    """Start from 2017 and add the changes one by one; SwiGLU has two thirds of the width."""
    setup = character_model(run, init="xavier")
    dim = setup.base["dim"]
    old = {
        "norm_position": "post",
        "norm": "layer",
        "activation": "relu",
        "position": "sinusoidal",
        "scale_embedding": True,
    }
    new = {**MODERN, "ff_dim": dim * 8 // 3}
    swiglu = {"activation": "swiglu", "ff_dim": dim * 8 // 3}
    variants = (
        Variant("2017", old),
        Variant("2017 + pre-norm", old | {"norm_position": "pre"}),
        Variant("2017 + RMSNorm", old | {"norm": "rms"}),
        Variant("2017 + SwiGLU", old | swiglu),
        Variant("2017 + rotary", old | {"position": "rotary"}),
        Variant("2024", new),
    )
    return setup.compare(run, variants)


EXPERIMENT = Experiment(
    name="modern-block",
    title=Text("The blocks of 2017 and 2024", "2017 年与 2024 年的模块"),
    claim=Text("The modern block is better than the original one.", "现代模块优于原始模块。"),
    checklist=(134, 140, 141, 143, 144),
    predictions=(
        Prediction(Text("2024 has the lower loss", "2024 年的损失更低"), "loss", "2024", "2017", "lower", 0.03),
        Prediction(Text("Rotary positions alone lower the loss", "只换旋转位置编码，损失就降低"),
                   "loss", "2017 + rotary", "2017", "lower", 0.02),
        Prediction(Text("RMSNorm alone changes nothing", "只换 RMSNorm 没有变化"),
                   "loss", "2017 + RMSNorm", "2017", "same", 0.03),
    ),
    measure=measure,
    figures=(Figure("loss", Text("Test loss", "测试损失")), Figure("parameters", Text("Parameters", "参数量"))),
    papers=("Narang et al. 2021, arXiv 2102.11972", "arXiv 2605.20798"),
    needs=("tinyshakespeare",),
)  # fmt: skip
