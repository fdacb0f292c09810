"""Greedy decoding, temperature and top-p: repetition and diversity."""

from clearhead import load
from clearhead.lab.experiment import Experiment, Figure, Prediction, Results, Text
from clearhead.lab.runner import Run

PROMPTS = ("The old man", "She opened the door and", "It was late in the evening when", "My dear sir,",
           "He had never seen", "In the garden", "The ship", "When the letter came,")  # fmt: skip
SETTINGS = {
    "greedy": {"temperature": 0.0},
    "temperature 0.5": {"temperature": 0.5},
    "temperature 1": {"temperature": 1.0},
    "temperature 1.5": {"temperature": 1.5},
    "top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
}


def repetition(text: str) -> float:
    """Share of the four-word sequences that occurred before."""
    words = text.split()
    grams = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    return 1 - len(set(grams)) / max(1, len(grams))


def measure(run: Run) -> Results:
    """Continue eight prompts with novels-gpt, averaged over seeds; a prompt counts as a seed."""

    def part(options: dict[str, float]) -> dict[str, list[float]]:
        model = load("novels-gpt", device=run.device)
        repeated, distinct = [], []
        for seed in run.seeds:
            results = model.generate(list(PROMPTS), max_new_tokens=run.pick(120, 200), seed=seed, **options)  # type: ignore[call-overload]
            texts = [result.text.lower() for result in results]
            repeated.append([repetition(text) for text in texts])
            distinct.append([len(set(text.split())) / max(1, len(text.split())) for text in texts])
        columns = {"repetition": repeated, "distinct words": distinct}
        return {
            name: [sum(column) / len(column) for column in zip(*rows, strict=True)] for name, rows in columns.items()
        }

    results: Results = {}
    for name, options in SETTINGS.items():
        results |= run.part(name, lambda name=name, options=options: {name: part(options)})  # type: ignore[misc]
    return results


EXPERIMENT = Experiment(
    name="sampling",
    title=Text("Greedy decoding and sampling", "贪心解码与采样"),
    claim=Text("The head does not have to take the most likely token; temperature and top-p trade repetition for diversity.",
               "输出头不一定取概率最高的 token；temperature 和 top-p 在重复与多样之间取舍。"),
    checklist=(131, 132),
    predictions=(
        Prediction(Text("Greedy text repeats itself", "贪心生成的文本会重复自己"), "repetition", "greedy", "temperature 1", "higher", 0.1),
        Prediction(Text("Top-p 0.9 hardly repeats", "top-p 0.9 几乎不重复"), "repetition", "top-p 0.9", 0.0, "same", 0.05),
        Prediction(Text("Higher temperature, more different words", "温度越高，用词越多样"),
                   "distinct words", "temperature 1.5", "temperature 0.5", "higher", 0.05),
    ),
    measure=measure,
    figures=(Figure("repetition", Text("Repeated four-word sequences", "重复的四词序列比例")),
             Figure("distinct words", Text("Distinct words", "不同词的比例"))),
    note=Text("One small model, novels-gpt; intervals are over eight prompts.", "单个小模型 novels-gpt；区间按八个开头计算。"),
    papers=("Holtzman et al. 2020, arXiv 1904.09751",),
)  # fmt: skip
