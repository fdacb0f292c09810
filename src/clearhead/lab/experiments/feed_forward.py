"""Without the feed-forward sublayer, and attention-only models of equal size."""

import torch

from clearhead.config import ModelConfig
from clearhead.lab.ensemble import Variant
from clearhead.lab.experiment import Experiment, Figure, Prediction, Results, Text
from clearhead.lab.parts import without_feed_forward
from clearhead.lab.runner import Run
from clearhead.lab.setups import character_model
from clearhead.model.feedforward import FeedForward


def position_wise(run: Run) -> Results:
    """Apply the feed-forward to permuted tokens: the largest difference from permuting its output."""
    differences = []
    for seed in run.seeds:
        torch.manual_seed(seed)
        layer = FeedForward(ModelConfig(family="decoder", decoder_layers=1, dim=32, heads=2, vocab_size=1))
        x, order = torch.randn(2, 10, 32), torch.randperm(10)
        differences.append((layer(x[:, order]) - layer(x)[:, order]).abs().max().item())
    return {"permuted": {"difference": differences}}


def measure(run: Run) -> Results:
    """Remove it, then spend its parameters on three times as many attention layers."""
    setup = character_model(run)
    layers = setup.base["decoder_layers"]
    variants = (
        Variant("with feed-forward"),
        Variant("without", change=without_feed_forward),
        Variant("attention only, equal size", {"decoder_layers": 3 * layers}, change=without_feed_forward),
    )
    return run.part("permutation", lambda: position_wise(run)) | setup.compare(run, variants)


EXPERIMENT = Experiment(
    name="feed-forward",
    title=Text("The feed-forward sublayer", "前馈子层"),
    claim=Text("The feed-forward sublayer adds what attention lacks: a non-linear transformation of each token.",
               "前馈子层补上注意力所缺的部分：对每个 token 的非线性变换。"),
    checklist=(17, 18, 56, 95, 116, 117, 147),
    predictions=(
        Prediction(Text("Without it the loss is higher", "去掉它损失更高"), "loss", "without", "with feed-forward", "higher", 0.03),
        Prediction(Text("More attention of equal size does not make up for it", "用等量参数的注意力补不回来"),
                   "loss", "attention only, equal size", "with feed-forward", "higher", 0.02),
        Prediction(Text("It treats positions alike: permuting tokens permutes its output", "它对各位置一视同仁：打乱 token，输出也同样打乱"),
                   "difference", "permuted", 0.0, "same", 1e-5),
    ),
    measure=measure,
    figures=(Figure("loss", Text("Test loss", "测试损失")), Figure("parameters", Text("Parameters", "参数量"))),
    papers=("Geva et al. 2021, arXiv 2012.14913",),
    needs=("tinyshakespeare",),
)  # fmt: skip
