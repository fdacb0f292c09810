"""Representations by depth: what a linear probe reads from each layer."""

from collections import Counter

import torch

from clearhead import load
from clearhead.lab.experiment import Experiment, Figure, Prediction, Results, Text
from clearhead.lab.probes import hidden_states, probe_accuracy
from clearhead.lab.runner import Run
from clearhead.lab.tasks import corpus


def words_and_tags(sentences: int) -> list[list[tuple[str, str]]]:
    """Return CoNLL-2003 sentences as words with entity tags."""
    rows: list[list[tuple[str, str]]] = [[]]
    for line in corpus("conll2003_en/valid.txt.gz"):
        word, _, tag = line.strip().rpartition(" ")
        if word:
            rows[-1].append((word.lower(), tag))
        elif rows[-1]:
            rows.append([])
    return [row for row in rows if 4 < len(row) < 40][:sentences]


def measure(run: Run) -> Results:
    """Probe the token itself and its entity tag at every layer; seeds are splits into train and test."""

    def part() -> Results:
        model = load("novels-bert", device=run.device)
        states, tags, words = [], [], []
        for row in words_and_tags(run.pick(250, 1000)):
            tokens, hidden = hidden_states(model, " ".join(word for word, _ in row))
            position = 0
            for word, tag in row:  # words that are one token, in order
                if word in tokens[position:]:
                    position = tokens.index(word, position)
                    states.append(hidden[:, position])
                    tags.append(tag.rpartition("-")[2])
                    words.append(word)
        common = {word for word, _ in Counter(words).most_common(40)}
        layers = torch.stack(states)  # (N, layers + 1, D)
        results: Results = {}
        for name, labels, rows in (
            ("token", words, [i for i, word in enumerate(words) if word in common]),
            ("entity", tags, [i for i, tag in enumerate(tags) if tag != "O"]),
        ):
            table = {label: index for index, label in enumerate(sorted({labels[i] for i in rows}))}
            target = torch.tensor([table[labels[i]] for i in rows])
            for layer in range(layers.shape[1]):
                accuracy = [probe_accuracy(layers[rows, layer], target, seed) for seed in run.seeds]
                results[f"{name}|{layer}"] = {"accuracy": accuracy}
        return results

    return run.part("probes", part)


EXPERIMENT = Experiment(
    name="probing",
    title=Text("Representations by depth", "不同深度的表示"),
    claim=Text("Layer by layer, representations become more abstract.", "表示逐层变得更抽象。"),
    checklist=(130,),
    predictions=(
        Prediction(Text("The kind of a name is easier to read in layer 2 than in the embedding", "第 2 层比嵌入更容易读出实体类型"),
                   "accuracy", "entity|2", "entity|0", "higher", 0.02),
        Prediction(Text("The token itself is harder to read in the last layer", "最后一层更难读出 token 本身"),
                   "accuracy", "token|4", "token|0", "lower", 0.02),
        Prediction(Text("The last layer is no better than layer 2 for names", "在实体类型上，最后一层不比第 2 层好"),
                   "accuracy", "entity|4", "entity|2", "same", 0.03),
    ),
    measure=measure,
    figures=(Figure("accuracy", Text("Accuracy of a linear probe", "线性探针的准确率"), Text("layer", "层")),),
    note=Text("novels-bert on news; intervals are over splits, not over models. Frequent words are read without error at every layer, so that"
              " probe cannot tell the layers apart.",
              "novels-bert 处理新闻文本；区间只反映划分，不反映不同的模型。常见词在每一层都能无误读出，所以这个探针分不出各层的差别。"),
    needs=("conll2003_en",),
)  # fmt: skip
