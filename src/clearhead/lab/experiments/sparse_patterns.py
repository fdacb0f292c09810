"""Sparse attention patterns: loss and share of the pairs that are computed."""

import torch

from clearhead.config import ModelConfig
from clearhead.lab.ensemble import Variant
from clearhead.lab.experiment import Experiment, Figure, Prediction, Results, Text
from clearhead.lab.runner import Run
from clearhead.lab.setups import character_model
from clearhead.ops.masks import Mask, patterns

SETTINGS = {
    "full": {},
    "window": {"attention": "window", "window": 8},
    "strided": {"attention": "strided", "stride": 8},
    "fixed": {"attention": "fixed", "stride": 8, "summary": 2},
}


def share_of_pairs(config: ModelConfig, tokens: int) -> float:
    """Return the share of causal pairs that the layers compute."""
    dense = [
        Mask(causal=True, pattern=pattern).dense(tokens, tokens, torch.device("cpu"))
        for pattern in patterns(config, config.decoder_layers)
    ]
    return (
        sum(mask.float().mean().item() for mask in dense if mask is not None) / len(dense) * 2 * tokens / (tokens + 1)
    )


def measure(run: Run) -> Results:
    """Train each pattern; count pairs at 1,024 tokens."""
    setup = character_model(run, run.pick(48, 128))
    results: Results = setup.compare(run, [Variant(name, settings) for name, settings in SETTINGS.items()])
    for name, settings in SETTINGS.items():
        share = share_of_pairs(ModelConfig(**{**setup.base, **settings}), 1024)
        results[name]["share of pairs"] = [share] * len(run.seeds)
    return results


EXPERIMENT = Experiment(
    name="sparse-patterns",
    title=Text("Sparse attention", "稀疏注意力"),
    claim=Text("Sparse attention computes far fewer pairs at little loss.", "稀疏注意力计算的词对少得多，损失却不大。"),
    checklist=(139,),
    predictions=(
        Prediction(Text("Strided: under a tenth of the pairs at 1,024 tokens", "strided：1024 个 token 时词对不到十分之一"),
                   "share of pairs", "strided", 0.1, "lower", 0.001, exact=True),
        Prediction(Text("Strided: the loss is no different", "strided：损失没有差别"), "loss", "strided", "full", "same", 0.03),
        Prediction(Text("Fixed: the loss is no different", "fixed：损失没有差别"), "loss", "fixed", "full", "same", 0.03),
    ),
    measure=measure,
    figures=(Figure("loss", Text("Test loss", "测试损失")), Figure("share of pairs", Text("Share of the causal pairs", "因果词对的比例"))),
    note=Text("Characters; most of what predicts the next one is near.", "字符级任务；预测所需的信息大多在附近。"),
    papers=("Child et al. 2019, arXiv 1904.10509",),
    needs=("tinyshakespeare",),
)  # fmt: skip
