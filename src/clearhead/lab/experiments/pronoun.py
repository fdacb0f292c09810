"""The pronoun of "the dog chased the cat because it was hungry": where does its attention go?"""

from clearhead import load
from clearhead.lab.experiment import Experiment, Figure, Prediction, Results, Text
from clearhead.lab.probes import mean_attention
from clearhead.lab.runner import Run
from clearhead.predict.model import Model

PAIRS = (("dog", "cat"), ("boy", "horse"), ("man", "bird"), ("horse", "dog"), ("woman", "child"), ("king", "horse"),
         ("girl", "doctor"), ("cat", "bird"))  # fmt: skip
ENDINGS = ("was hungry", "was very tired", "was afraid")


def share_of_subject(model: Model, subject: str, object_: str, ending: str) -> float:
    """Attention from "it" to the subject, as a share of that to subject and object."""
    tokens, weights = mean_attention(model, f"the {subject} followed the {object_} because it {ending}.")
    row = weights[tokens.index("it")]
    first, second = row[tokens.index(subject)].item(), row[tokens.index(object_)].item()
    return first / (first + second)


def measure(run: Run) -> Results:
    """Both orders of each pair, so that words and places balance; a pair counts as a seed."""

    def part(name: str) -> Results:
        model = load(name, device=run.device)
        shares = []
        for a, b in PAIRS:
            both = [share_of_subject(model, *pair, ending) for pair in ((a, b), (b, a)) for ending in ENDINGS]
            shares.append(sum(both) / len(both))
        return {name: {"share of the subject": shares}}

    return run.part("bert", lambda: part("novels-bert")) | run.part("gpt", lambda: part("novels-gpt"))


EXPERIMENT = Experiment(
    name="pronoun",
    title=Text("“It”: the dog or the cat?", "“it”指狗还是猫？"),
    claim=Text("In “The dog chased the cat because it was hungry”, “it” attends to the dog more than to the cat.",
               "在 “The dog chased the cat because it was hungry” 中，it 对 dog 的注意力高于 cat。"),
    checklist=(135, 136, 138),
    predictions=(
        Prediction(Text("novels-bert: the subject gets more attention", "novels-bert：主语得到更多注意力"),
                   "share of the subject", "novels-bert", 0.5, "higher", 0.05),
        Prediction(Text("novels-gpt: the nearer object gets more attention", "novels-gpt：更近的宾语得到更多注意力"),
                   "share of the subject", "novels-gpt", 0.5, "lower", 0.05),
    ),
    measure=measure,
    figures=(Figure("share of the subject", Text("Share of the subject; 0.5 is equal", "主语所占比例；0.5 表示相等")),),
    note=Text("Two small models, 8 pairs of nouns in both orders, three endings; weights averaged over layers and heads.",
              "两个小模型，8 对名词正反两序，三种结尾；权重按层和头取平均。"),
)  # fmt: skip
