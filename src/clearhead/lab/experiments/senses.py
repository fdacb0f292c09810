"""Words of two senses: static vectors against contextual ones, layer by layer."""

from importlib import resources

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead import load
from clearhead.lab.experiment import Experiment, Figure, Prediction, Results, Text
from clearhead.lab.probes import hidden_states
from clearhead.lab.runner import Run


def nearest_has_the_sense(vectors: Tensor, senses: list[str]) -> float:
    """Share of vectors whose nearest other vector (cosine) has the same sense; equal vectors count half."""
    unit = F.normalize(vectors.double(), dim=-1)
    similarity = (unit @ unit.T).fill_diagonal_(-2)
    score = 0.0
    for row in range(len(senses)):
        nearest = (similarity[row] >= similarity[row].max() - 1e-9).nonzero()[:, 0].tolist()
        score += sum(senses[other] == senses[row] for other in nearest) / len(nearest)
    return score / len(senses)


def measure(run: Run) -> Results:
    """Vectors of the word in each sentence, from the embeddings (layer 0) to the last layer; a word counts as a seed."""

    def part() -> Results:
        model = load("novels-bert", device=run.device)
        rows = [
            line.split("\t")
            for line in (resources.files(__package__) / "senses.tsv").read_text(encoding="utf-8").splitlines()
        ]
        results: Results = {}
        for word in dict.fromkeys(row[0] for row in rows):
            chosen = [row for row in rows if row[0] == word]
            states = []
            for _, _, sentence in chosen:
                tokens, hidden = hidden_states(model, sentence)  # (layers + 1, T, D)
                states.append(hidden[:, tokens.index(word)])
            senses = [row[1] for row in chosen]
            static = model.network.encoder.embedding.tokens.weight[model.tokenizer.encode(word)[0]]
            layers = {"static|0": static.expand(len(chosen), -1)}
            layers |= {f"contextual|{layer}": torch.stack(states, 1)[layer] for layer in range(1, len(states[0]))}
            for cell, vectors in layers.items():
                results.setdefault(cell, {"accuracy": []})["accuracy"].append(nearest_has_the_sense(vectors, senses))
        return results

    return run.part("vectors", part)


EXPERIMENT = Experiment(
    name="senses",
    title=Text("Static and contextual vectors", "静态向量与上下文向量"),
    claim=Text("A static vector cannot tell the bank of a river from one for money; contextual vectors can.",
               "静态词向量分不清河岸与银行（bank）；上下文向量可以。"),
    checklist=(14, 106, 107, 108, 110, 113, 117),
    predictions=(
        Prediction(Text("Static vectors: chance (three of seven)", "静态向量：等于瞎猜（七分之三）"), "accuracy", "static|0", 3 / 7, "same", 0.01, exact=True),
        Prediction(Text("Last layer: better than static vectors", "最后一层：优于静态向量"), "accuracy", "contextual|4", "static|0", "higher", 0.1),
    ),
    measure=measure,
    figures=(Figure("accuracy", Text("The nearest vector has the same sense", "最近的向量词义相同的比例"), Text("layer", "层")),),
    note=Text("novels-bert, 8 words of two senses, 4 sentences each; intervals are over words (n = 8).", "novels-bert，8 个双义词，每义 4 句；区间按词计算。"),
    papers=("Ethayarajh 2019, arXiv 1909.00512",),
)  # fmt: skip
