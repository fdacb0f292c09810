"""The report shows every verdict in both languages, and the figures draw what was measured."""

import re
from dataclasses import replace
from pathlib import Path

from typer.testing import CliRunner

from clearhead.cli import app
from clearhead.lab.experiment import Experiment, Figure, Prediction, Results, Text
from clearhead.lab.figure import draw
from clearhead.lab.names import name_in
from clearhead.lab.registry import all_experiments, committed_records
from clearhead.lab.report import report
from clearhead.lab.runner import Run, run_experiment

VALUES: Results = {
    "new": {"loss": [1.0, 1.1, 0.9, 1.05]},
    "old": {"loss": [2.0, 2.12, 1.91, 2.04]},
    "like old": {"loss": [2.01, 2.11, 1.92, 2.03]},
    "line|1": {"time": [1.0, 1.1]},
    "line|10": {"time": [2.0, 2.1]},
}


def experiment() -> Experiment:
    def prediction(name: str, direction: str, of: str = "new") -> Prediction:
        return Prediction(Text(name, f"预测：{name}"), "loss", of, "old", direction, 0.5)  # type: ignore[arg-type]

    predictions = (prediction("good", "lower"), prediction("bad", "higher"), prediction("none", "lower", "like old"))
    figures = (
        Figure("loss", Text("Loss <1>", "损失")),
        Figure("time", Text("Time", "时间"), Text("length", "长度"), log_x=True),
    )
    return Experiment(
        "planted", Text("Planted", "预设"), Text("It works.", "有效。"), (7,), predictions, lambda run: VALUES, figures
    )


def test_the_report_has_verdicts_effects_and_facts_in_both_languages(tmp_path: Path) -> None:
    record = run_experiment(Run(experiment(), tmp_path), "clearhead lab run planted")
    page = report({"planted": experiment()}, {"planted": record})
    section = page.partition('id="planted"')[2]
    assert re.findall(r'<b class="en ([\w-]+)"', section) == ["held", "not-held", "no-difference"]
    for text in (
        "It works.",
        "有效。",
        "成立",
        "不成立",
        "无差异",
        "-1.0",
        "clearhead lab run planted",
        "Loss &lt;1&gt;",
    ):
        assert text in section, text
    assert experiment().hash()[:16] in section
    assert page.count("<svg") == 4
    assert (tmp_path / "planted" / "figure-2.svg").read_text(encoding="utf-8") == draw(experiment().figures[1], VALUES)
    for text in ("loss 1.01 against 2.02", "损失 1.01，对照 2.02", "higher by at least 0.5", "noise 0.0873"):
        assert text in section, text


def test_the_report_names_what_is_missing_or_only_quick(tmp_path: Path) -> None:
    experiments = {name: replace(experiment(), name=name) for name in ("a", "b", "c")}
    quick = {name: run_experiment(Run(experiments[name], tmp_path)) for name in ("a", "b")}
    full = {"b": run_experiment(Run(experiments["b"], tmp_path, "full"))}
    page = report(experiments, full, quick)
    assert "Not run yet: c." in page
    assert "Run in the quick size only (1 of 2; smaller models, fewer steps and seeds): a." in page
    assert "只运行了快速规模" in page
    assert page.count("Also run: ") == 1  # the quick result of b, below its full one
    assert "Run in the quick size only" not in report(experiments, full)


def test_the_report_needs_no_network(tmp_path: Path) -> None:
    page = report({"planted": experiment()}, {"planted": run_experiment(Run(experiment(), tmp_path))})
    assert not re.findall(r'(?:src|href)="(?!#)|url\(|<script', page)


def test_figures_draw_each_cell_once() -> None:
    bars = draw(Figure("loss", Text("", "")), VALUES)
    assert bars.count("<title>") == 3
    assert "new: 1.012" in bars
    lines = draw(Figure("time", Text("", ""), Text("length", "长度")), VALUES, 1)
    assert lines.count("<title>") == 2
    assert "长度" in lines
    assert not draw(Figure("nothing", Text("", "")), VALUES)


def test_constant_and_infinite_values_can_be_drawn() -> None:
    assert "a: 0" in draw(Figure("x", Text("", "")), {"a": {"x": [0.0, 0.0]}, "b": {"x": [float("inf"), 1.0]}})


def test_lab_list_and_report_on_the_command_line(tmp_path: Path) -> None:
    listed = CliRunner().invoke(app, ["lab", "list"]).output
    assert all(name in listed for name in all_experiments())
    missing = CliRunner().invoke(app, ["lab", "report", "--out", str(tmp_path)])
    assert missing.exit_code != 0
    assert "no finished experiments" in str(missing.exception)


def test_experiments_have_claims_in_both_languages_and_small_files() -> None:
    experiments = all_experiments()
    assert len(experiments) >= 36
    for each in experiments.values():
        texts = [each.title, each.claim, *(p.text for p in each.predictions), *(f.title for f in each.figures)]
        for text in texts:
            assert text.en, each.name
            assert re.search("[\u4e00-\u9fff]", text.zh) or text.zh.isascii(), (each.name, text)
        assert each.predictions, each.name
        assert all(p.at_least > 0 for p in each.predictions), each.name
        assert len(Path(each.source).read_text(encoding="utf-8").splitlines()) < 80, each.name


def test_names_are_chinese_in_parts() -> None:
    assert name_in(1, "topic: bag of words") == "主题：词袋"
    assert name_in(1, "BatchNorm over padding|32") == "BatchNorm（含填充），32"
    assert name_in(1, "Q, K, V") == "Q，K，V"
    assert name_in(0, "pre, no warm-up|12") == "pre, no warm-up, 12"


def test_cells_and_metrics_of_the_committed_results_have_chinese_names() -> None:
    terms = r"Norm|LSTM|GPT|BERT|word2vec|novels|SwiGLU|top-p|dropout|dim|lr|weights|token|[QK] =|Q, K|20\d\d|ε"
    for records in committed_records():
        for record in records.values():
            for cell, metrics in record["results"].items():
                for name in (cell.partition("|")[0], *metrics):
                    chinese = re.search("[\u4e00-\u9fff]|BLEU", name_in(1, name))
                    assert chinese or re.search(terms, name), (record["name"], name)


CLAIMS = """
    recall-distance translation-mixers parallel-length scaling heads mask-order look-ahead padding
    positions batch-norm-text norm-axis batch-norm-cnn rms-norm pre-norm residual feed-forward
    embedding-scale tying label-smoothing teacher-forcing exposure-bias kv-cache grouped-query
    sparse-patterns context-length senses word-order bidirectional next-sentence pretraining
    sampling tokenizers value-matrix heads-off attention-weight projections probing modern-block
    pronoun table-3
"""


def test_no_experiment_is_lost() -> None:
    assert set(CLAIMS.split()) <= set(all_experiments())
