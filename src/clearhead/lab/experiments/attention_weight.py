"""Attention weight of a token against the effect of removing it."""

from importlib import resources

import torch

from clearhead import load
from clearhead.lab.experiment import Experiment, Figure, Prediction, Results, Text
from clearhead.lab.probes import mean_attention
from clearhead.lab.runner import Run
from clearhead.lab.statistics import rank_correlation
from clearhead.predict.fill import masked_rows
from clearhead.predict.model import Model

MASK = "[MASK]"


def distribution(model: Model, words: list[str]) -> torch.Tensor:
    """Logprobs at the first mask."""
    ids = torch.tensor([masked_rows(model, [" ".join(words)])[0].ids])
    position = int((ids[0] == model.tokenizer.id("mask")).nonzero()[0])
    return model.logits(ids)[0, position].double().log_softmax(-1).cpu()


def correlations(model: Model, sentence: str) -> float:
    """Mask the middle word; correlate attention to each other word with the divergence when that word goes."""
    words = sentence.rstrip(".?").lower().replace(",", "").split()
    middle = len(words) // 2
    masked = [*words[:middle], MASK, *words[middle + 1 :]]
    before = distribution(model, masked)
    tokens, weights = mean_attention(model, " ".join(masked))
    query = tokens.index(model.tokenizer.id_to_token(model.tokenizer.id("mask")))
    attention, effect = [], []
    for index, word in enumerate(masked):
        if index == middle or word not in tokens:
            continue
        after = distribution(model, [*masked[:index], *masked[index + 1 :]])
        attention.append(weights[query, tokens.index(word)].item())
        effect.append((before.exp() * (before - after)).sum().item())
    return rank_correlation(attention, effect)


def measure(run: Run) -> Results:
    """Each sentence counts as a seed."""

    def part() -> Results:
        model = load("novels-bert", device=run.device)
        lines = (resources.files(__package__) / "senses.tsv").read_text(encoding="utf-8").splitlines()
        sentences = [line.split("\t")[2] for line in lines]
        return {"sentences": {"rank correlation": [correlations(model, sentence) for sentence in sentences]}}

    return run.part("sentences", part)


EXPERIMENT = Experiment(
    name="attention-weight",
    title=Text("Does attention weight show importance?", "注意力权重代表重要性吗？"),
    claim=Text("The weight of a token says how much it contributes to the output.", "权重越大的 token，对输出的贡献越大。"),
    checklist=(40, 60, 113, 138),
    predictions=(
        Prediction(Text("Weight and effect of removal are correlated", "权重与移除的影响相关"),
                   "rank correlation", "sentences", 0.0, "higher", 0.1),
        Prediction(Text("But far from perfectly", "但远非完全一致"), "rank correlation", "sentences", 0.8, "lower", 0.1),
    ),
    measure=measure,
    figures=(Figure("rank correlation", Text("Rank correlation, averaged over sentences", "秩相关（句子平均）")),),
    note=Text("novels-bert, a masked word in 64 sentences; weights averaged over layers and heads.", "novels-bert，64 句各遮住一个词；权重按层和头取平均。"),
    papers=("Jain and Wallace 2019, arXiv 1902.10186", "Serrano and Smith 2019, arXiv 1906.03731"),
)  # fmt: skip
