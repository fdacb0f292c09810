"""RMSNorm against LayerNorm: loss, and time of the norm itself."""

import time

import torch

from clearhead.lab.ensemble import Variant
from clearhead.lab.experiment import Experiment, Figure, Prediction, Results, Text
from clearhead.lab.runner import Run
from clearhead.lab.setups import character_model
from clearhead.model.norms import LayerNorm, RMSNorm


def timing(run: Run) -> Results:
    """Time both norms forward and backward; each repetition counts as a seed."""
    results: Results = {}
    for name, norm in (("LayerNorm", LayerNorm(512)), ("RMSNorm", RMSNorm(512))):
        norm, x = norm.to(run.device), torch.randn(2048, 512, device=run.device, requires_grad=True)
        seconds = []
        for _ in range(len(run.seeds) + 2):
            start = time.perf_counter()
            for _ in range(5):
                norm(x).sum().backward()
            if x.is_cuda:
                torch.cuda.synchronize()
            seconds.append((time.perf_counter() - start) / 5)
        results[f"time of {name}"] = {"seconds": seconds[2:]}
    return results


def measure(run: Run) -> Results:
    """Train with both norms, and time them."""
    variants = (Variant("LayerNorm"), Variant("RMSNorm", {"norm": "rms"}))
    return run.part("time", lambda: timing(run)) | character_model(run).compare(run, variants)


EXPERIMENT = Experiment(
    name="rms-norm",
    title=Text("RMSNorm and LayerNorm", "RMSNorm 与 LayerNorm"),
    claim=Text("RMSNorm is as good as LayerNorm and cheaper.", "RMSNorm 与 LayerNorm 同样好，而且更省计算。"),
    checklist=(140, 141),
    predictions=(
        Prediction(Text("The losses are equal", "损失相同"), "loss", "RMSNorm", "LayerNorm", "same", 0.02),
        Prediction(Text("RMSNorm takes less time", "RMSNorm 用时更少"),
                   "seconds", "time of RMSNorm", "time of LayerNorm", "lower", 0.05, relative=True),
        Prediction(Text("RMSNorm has fewer parameters", "RMSNorm 参数更少"),
                   "parameters", "RMSNorm", "LayerNorm", "lower", 1, exact=True),
    ),
    measure=measure,
    figures=(Figure("loss", Text("Test loss", "测试损失")), Figure("seconds", Text("Seconds for 2,048 tokens", "2048 个 token 的用时（秒）"))),
    note=Text("Times are of torch's own kernels for both norms.", "两种归一化都用 torch 自带的内核计时。"),
    papers=("Zhang and Sennrich 2019, arXiv 1910.07467", "Narang et al. 2021, arXiv 2102.11972"),
    needs=("tinyshakespeare",),
)  # fmt: skip
