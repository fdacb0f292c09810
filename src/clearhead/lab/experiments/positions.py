"""Positions: none, sinusoidal, learned, rotary; trained short, tested long, with rotary interpolation."""

from typing import Any

from clearhead.config.model import RopeScaling
from clearhead.lab.ensemble import Ensemble, Variant
from clearhead.lab.experiment import Experiment, Figure, Prediction, Results, Text
from clearhead.lab.runner import Metrics, Run
from clearhead.lab.setups import character_model
from clearhead.lab.tasks import characters


def measure(run: Run) -> Results:
    """Cells are "position|test length as a multiple of the trained one"."""
    length = run.pick(32, 64)
    rows = run.pick(128, 512)
    tests = {
        str(times): {name: values[:rows] for name, values in characters(times * length).test.items()}
        for times in (1, 2, 4)
    }
    setup = character_model(run, length, max_positions=4 * length, init="xavier", scale_embedding=True)
    scaling = RopeScaling(factor=4, original_positions=length)

    def interpolated(ensemble: Ensemble) -> dict[str, Metrics]:
        decoder: Any = ensemble.template.decoder
        if decoder.config.position != "rotary":
            return {}
        decoder.config = decoder.config.model_copy(update={"rope_scaling": scaling})
        return {", interpolated|4": ensemble.evaluate(tests["4"])}

    variants = [Variant(position, {"position": position}) for position in ("none", "sinusoidal", "learned", "rotary")]
    return setup.compare(run, variants, tests, interpolated)


EXPERIMENT = Experiment(
    name="positions",
    title=Text("Position encodings and longer texts", "位置编码与更长的文本"),
    claim=Text("Positions must be encoded; rotary positions handle longer contexts better.",
               "必须编码位置；旋转位置编码能更好地处理长上下文。"),
    checklist=(15, 35, 100, 143),
    predictions=(
        Prediction(Text("A causal model is worse without positions", "因果模型没有位置编码会更差"),
                   "loss", "none|1", "rotary|1", "higher", 0.02),
        Prediction(Text("Sinusoidal and learned positions are equal", "正弦与可学习的位置编码相当"),
                   "loss", "sinusoidal|1", "learned|1", "same", 0.03),
        Prediction(Text("Rotary positions fail at four times the trained length", "旋转位置编码在四倍训练长度上失效"),
                   "loss", "rotary|4", "rotary|1", "higher", 0.05),
        Prediction(Text("Interpolation repairs a part", "插值能挽回一部分"),
                   "loss", "rotary, interpolated|4", "rotary|4", "lower", 0.02),
        Prediction(Text("At four times the length, rotary beats learned positions", "四倍长度上旋转优于可学习"),
                   "loss", "rotary|4", "learned|4", "lower", 0.05),
    ),
    measure=measure,
    figures=(Figure("loss", Text("Test loss by test length", "不同测试长度的损失"),
                    Text("test length / trained length", "测试长度 / 训练长度"), log_x=True),),
    papers=("Kazemnejad et al. 2023, arXiv 2305.19466", "Haviv et al. 2022, arXiv 2203.16634"),
    needs=("tinyshakespeare",),
)  # fmt: skip
