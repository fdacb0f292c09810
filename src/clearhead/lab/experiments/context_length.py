"""Context length: time of attention and memory of its weights, and what it costs in parameters."""

import time

import torch

from clearhead.config import ModelConfig, preset
from clearhead.lab.experiment import Experiment, Figure, Prediction, Results, Text
from clearhead.lab.runner import Run
from clearhead.model.cost import model_cost
from clearhead.ops.attention import attention_with_weights
from clearhead.ops.masks import Mask


def measure(run: Run) -> Results:
    """Time the written-out attention by length; count parameters."""

    def part(length: int) -> Results:
        q = torch.randn(1, 4, length, 32, device=run.device)
        seconds = []
        for _ in range(len(run.seeds) + 1):
            start = time.perf_counter()
            attention_with_weights(q, q, q, Mask(causal=True))
            if q.is_cuda:
                torch.cuda.synchronize()
            seconds.append(1000 * (time.perf_counter() - start))
        return {f"attention|{length}": {"milliseconds": seconds[1:], "weights": [4.0 * length**2] * len(run.seeds)}}

    results: Results = {}
    for length in (256, 512, 1024, 2048):
        results |= run.part(f"{length} tokens", lambda length=length: part(length))  # type: ignore[misc]
    gpt = preset("gpt1")

    def parameters(config: ModelConfig) -> dict[str, list[float]]:
        return {"parameters": [float(model_cost(config).parameters)] * len(run.seeds)}

    results["GPT-1"] = parameters(gpt)
    results["GPT-1, 1,024 tokens"] = parameters(gpt.model_copy(update={"max_positions": 1024}))
    results["GPT-1, 11 layers"] = parameters(gpt.model_copy(update={"decoder_layers": 11}))
    return results


EXPERIMENT = Experiment(
    name="context-length",
    title=Text("Context length", "上下文长度"),
    claim=Text("Attention costs the square of the length; the length does not change the number of parameters.",
               "注意力的开销与长度的平方成正比；长度不影响参数量。"),
    checklist=(55, 123, 124, 125, 126, 127),
    predictions=(
        Prediction(Text("Twice the length: about four times the time", "长度加倍：时间约为四倍"),
                   "milliseconds", "attention|2048", "attention|1024", "higher", 2.0, relative=True),
        Prediction(Text("Learned positions: 512 more tokens are 512 × 768 parameters more", "可学习位置：多 512 个 token 就多 512 × 768 个参数"),
                   "parameters", "GPT-1, 1,024 tokens", "GPT-1", "higher", 512 * 768, exact=True),
        Prediction(Text("A layer of GPT-1 has 7.09 million parameters, not tens of millions", "GPT-1 一层有 709 万个参数，而非几千万"),
                   "parameters", "GPT-1, 11 layers", "GPT-1", "lower", 7_087_872, exact=True),
        Prediction(Text("GPT-1 has 116.5 million parameters", "GPT-1 共 1.165 亿个参数"),
                   "parameters", "GPT-1", 116.5e6, "same", 5e4, exact=True),
    ),
    measure=measure,
    figures=(Figure("milliseconds", Text("Time of attention", "注意力的时间"), Text("tokens", "token 数"), log_x=True, log_y=True),),
    note=Text("Attention written out, four heads; SDPA avoids the memory, not the arithmetic.", "直接按公式计算的注意力，四个头；SDPA 省的是显存，不是运算量。"),
)  # fmt: skip
