"""Switching heads off in a trained translator, one by one and half of them."""

import torch

from clearhead import load
from clearhead.interpret.switches import Switch, all_heads, switched_off
from clearhead.interpret.trace import own_copy
from clearhead.lab.ensemble import Batch, cross_entropy, forward, to_device
from clearhead.lab.experiment import Experiment, Figure, Prediction, Results, Text
from clearhead.lab.runner import Run
from clearhead.lab.tasks import corpus, translation_batch


def measure(run: Run) -> Results:
    """Loss of en-de on blocks of Tatoeba pairs, each counted as a seed; heads are ranked on another block."""
    rows = run.pick(40, 200)

    def part() -> Results:
        model = load("en-de", device=run.device)
        network = own_copy(model.network)
        pairs = [line.split("\t")[:2] for line in corpus("tatoeba_en_de/deu.txt.gz")[60_000:130_000:7]]
        encoded = [model.tokenizer.encode_batch([pair[side] for pair in pairs]) for side in (0, 1)]
        kept = [i for i in range(len(pairs)) if len(encoded[0][i]) < 20 and len(encoded[1][i]) < 20]
        end = model.tokenizer.id("end")
        blocks = [kept[start : start + rows] for start in range(0, rows * (len(run.seeds) + 1), rows)]

        def loss(block: list[int], off: list[Switch]) -> float:
            sources = [[*encoded[0][i], end] for i in block]
            batch: Batch = translation_batch(sources, [encoded[1][i] for i in block], 21)
            batch["ids"][:, 0], batch["labels"][batch["labels"] == 2] = model.tokenizer.id("begin"), end
            with torch.no_grad(), switched_off(network, off):
                batch = to_device(batch, run.device)
                return cross_entropy(forward(network, batch), batch["labels"]).item()

        heads = all_heads(network)
        ranking = sorted(heads, key=lambda head: loss(blocks[-1], [head]))
        results: Results = {"all heads": {"loss": [loss(block, []) for block in blocks[:-1]]}}
        groups = {"least important head": ranking[:1], "median head": [ranking[len(ranking) // 2]],
                  "most important head": ranking[-1:], "least important quarter": ranking[: len(ranking) // 4],
                  "least important half": ranking[: len(ranking) // 2]}  # fmt: skip
        for name, off in groups.items():
            results[f"without: {name}"] = {"loss": [loss(block, off) for block in blocks[:-1]]}
        return results

    return run.part("heads", part)


EXPERIMENT = Experiment(
    name="heads-off",
    title=Text("Switching heads off", "关闭注意力头"),
    claim=Text("The heads' contributions add up; every head adds something of its own.", "各个头的贡献相加；每个头都贡献自己的一份。"),
    checklist=(60, 62, 63, 146),
    predictions=(
        Prediction(Text("Without the median head the loss hardly changes", "去掉重要性居中的头，损失几乎不变"),
                   "loss", "without: median head", "all heads", "same", 0.05),
        Prediction(Text("Without the most important head it rises", "去掉最重要的头，损失上升"),
                   "loss", "without: most important head", "all heads", "higher", 0.2),
        Prediction(Text("A quarter of the heads can go", "可以去掉四分之一的头"),
                   "loss", "without: least important quarter", "all heads", "same", 0.1),
    ),
    measure=measure,
    figures=(Figure("loss", Text("Loss of en-de", "en-de 的损失")),),
    note=Text("One trained model on pairs it may have seen; intervals are over texts.", "单个训练好的模型，句对可能在训练集中出现过；区间按文本计算。"),
    papers=("Michel et al. 2019, arXiv 1905.10650", "Voita et al. 2019, arXiv 1905.09418"),
    needs=("tatoeba_en_de",),
)  # fmt: skip
