"""Table 3 of the paper, rows A to E, scaled to Tatoeba: does its ranking hold?"""

from typing import Any

from clearhead.lab.ensemble import Variant
from clearhead.lab.experiment import Experiment, Figure, Prediction, Results, Text
from clearhead.lab.runner import Run
from clearhead.lab.setups import bleu_after, translator
from clearhead.lab.statistics import rank_correlation

# Row: (BLEU on newstest2013 as published, settings relative to a base of d, 8 heads, ff 4d)
PAPER: dict[str, tuple[float, dict[str, Any]]] = {
    "base": (25.8, {}),
    "A 1 head": (24.9, {"heads": 1}),
    "A 4 heads": (25.5, {"heads": 4}),
    "A 16 heads": (25.8, {"heads": 16}),
    "B small keys": (25.1, {"head_dim": 0.25}),
    "C 2 layers": (23.7, {"layers": 1 / 3}),
    "C half width": (24.5, {"dim": 0.5, "ff_dim": 0.5}),
    "C double width": (26.0, {"dim": 2.0, "ff_dim": 2.0}),
    "C small feed-forward": (25.4, {"ff_dim": 0.5}),
    "C large feed-forward": (26.2, {"ff_dim": 2.0}),
    "D no dropout": (24.6, {"dropout": 0.0}),
    "D dropout 0.2": (25.5, {"dropout": 0.2}),
    "D no smoothing": (25.3, {"smoothing": 0.0}),
    "E learned positions": (25.7, {"position": "learned"}),
}
QUICK = ("base", "A 1 head", "C 2 layers", "C half width", "C large feed-forward", "E learned positions")


def variant(name: str, dim: int, layers: int) -> Variant:
    """Scale one row of the table to our base."""
    changes = dict(PAPER[name][1])
    smoothing = changes.pop("smoothing", 0.1)
    width = int(dim * changes.pop("dim", 1))
    settings: dict[str, object] = {"dim": width, "ff_dim": int(4 * dim * changes.pop("ff_dim", 1))}
    settings["encoder_layers"] = settings["decoder_layers"] = max(1, round(layers * changes.pop("layers", 1)))
    settings["head_dim"] = width // int(changes.get("heads", 8))
    if "head_dim" in changes:
        settings["head_dim"] = max(2, int(width // 8 * changes.pop("head_dim")))
    return Variant(name, {"heads": 8, "dropout": 0.1, **settings, **changes}, label_smoothing=smoothing)


def measure(run: Run) -> Results:
    """Train the rows; correlate our BLEU with the published one, seed by seed."""
    setup, translation = translator(run, norm_position="post")
    names = run.pick(QUICK, tuple(PAPER))
    variants = [variant(name, run.pick(32, 64), run.pick(2, 3)) for name in names]
    results: Results = setup.compare(run, variants, after=bleu_after(run, translation))
    published = [PAPER[name][0] for name in names]
    columns = zip(*(results[name]["bleu"] for name in names), strict=True)
    results["ranking"] = {"rank correlation": [rank_correlation(published, list(column)) for column in columns]}
    return results


EXPERIMENT = Experiment(
    name="table-3",
    title=Text("Table 3 of the paper", "论文的表 3"),
    claim=Text("The paper's ranking of variants also holds for a small model on Tatoeba.", "论文对各变体的排名，在 Tatoeba 的小模型上同样成立。"),
    checklist=(1, 50, 88, 95, 100, 102, 103, 146),
    predictions=(
        Prediction(Text("The rank correlation is positive", "秩相关为正"), "rank correlation", "ranking", 0.0, "higher", 0.2),
        Prediction(Text("Fewer layers have a lower BLEU", "层数减少，BLEU 更低"), "bleu", "C 2 layers", "base", "lower", 0.5),
        Prediction(Text("Learned positions are no different", "可学习位置没有差别"), "bleu", "E learned positions", "base", "same", 1.5),
    ),
    measure=measure,
    figures=(Figure("bleu", Text("BLEU on Tatoeba", "Tatoeba 上的 BLEU")),),
    note=Text("Widths are a sixteenth or an eighth of the paper's, and training takes minutes: BLEU is a few points only, and fewer layers"
              " learn faster. A ranking of models trained so briefly says little about the paper's.",
              "宽度是论文的十六分之一到八分之一，训练只有几分钟：BLEU 只有几分，层数少的反而学得快。训练这么短的模型，其排名说明不了论文的排名。"),
    papers=("Vaswani et al. 2017, table 3",),
    needs=("tatoeba_en_de",),
)  # fmt: skip
