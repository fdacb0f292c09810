"""Training speed by sequence length: attention against torch's LSTM."""

import time

import torch
from torch import nn

from clearhead.config import ModelConfig
from clearhead.lab.experiment import Experiment, Figure, Prediction, Results, Text
from clearhead.lab.runner import Run
from clearhead.model.layer import Layer
from clearhead.ops.masks import FULL, Mask


class LSTM(nn.LSTM):
    """torch's LSTM, which returns its states only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)[0]


def tokens_per_second(module: nn.Module, x: torch.Tensor, mask: Mask | None, repeats: int) -> float:
    """Time forward and backward."""

    def step() -> float:
        out = module(x) if mask is None else module(x, mask)
        out.sum().backward()
        if x.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    step()
    start = step()
    for _ in range(repeats):
        end = step()
    return x.shape[0] * x.shape[1] * repeats / (end - start)


def measure(run: Run) -> Results:
    """Time one layer of equal size; each repetition counts as a seed."""
    dim = 256
    results: Results = {}
    config = ModelConfig(family="decoder", decoder_layers=1, dim=dim, heads=4, vocab_size=1)
    for length in run.pick((32, 128, 512), (128, 512, 2048)):

        def part(length: int = length) -> Results:
            x = torch.randn(run.pick(4, 32), length, dim, device=run.device)
            layer = Layer(config, FULL, cross=False).to(run.device)
            lstm = nn.Sequential(LSTM(dim, dim, batch_first=True), LSTM(dim, dim, batch_first=True)).to(run.device)
            both = (("attention", layer, Mask(causal=True)), ("LSTM", lstm, None))
            return {
                f"{name}|{length}": {"tokens/s": [tokens_per_second(module, x, mask, 2) for _ in run.seeds]}
                for name, module, mask in both
            }

        results |= run.part(f"length {length}", part)
    return results


EXPERIMENT = Experiment(
    name="parallel-length",
    title=Text("Parallel over the length", "在序列长度上并行"),
    claim=Text("An LSTM must go step by step; attention computes all positions at once and is faster in training.",
               "LSTM 必须一步一步计算；注意力一次算完所有位置，训练更快。"),
    checklist=(30, 34, 77),
    predictions=(
        Prediction(Text("At 512 tokens, attention trains faster", "512 个 token 时，注意力训练更快"),
                   "tokens/s", "attention|512", "LSTM|512", "higher", 0.5, relative=True),
    ),
    measure=measure,
    figures=(Figure("tokens/s", Text("Training speed by length", "不同长度的训练速度"), Text("tokens", "token 数"),
                    log_x=True, log_y=True),),
    note=Text("Forward and backward of one Transformer layer and of two LSTM layers with about as many weights.",
              "一个 Transformer 层与两个权重数相近的 LSTM 层的前向和反向。"),
)  # fmt: skip
