"""Next-sentence prediction beside the masked language model: does it help fine-tuning?"""

import torch

from clearhead.config import ModelConfig
from clearhead.lab.ensemble import Batch, Ensemble, Training, Variant
from clearhead.lab.experiment import Experiment, Figure, Prediction, Results, Text
from clearhead.lab.experiments.pretraining import fine_tune
from clearhead.lab.runner import Run
from clearhead.lab.tasks import sentence_pairs

LABELS = 1000


def with_next_sentence(batch: Batch, pairs: Batch) -> Batch:
    """Add the label of the pair at the first position of the masked rows."""
    return batch | {"labels": torch.cat([pairs["labels"][:, :1], batch["labels"][:, 1:]], 1)}


def measure(run: Run) -> Results:
    """Pretrain on pairs of lines, half of them neighbors; fine-tune on a new sample of the same question."""
    from clearhead.lab.tasks import masked

    data = sentence_pairs(run.pick(8000, 30_000), 32)
    mask = data.vocab_size
    config = ModelConfig(family="encoder", encoder_layers=2, dim=64, heads=4, vocab_size=mask + 1,
                         norm_position="pre", init="xavier", scale_embedding=True, dropout=0.1, tie="output")  # fmt: skip
    rest = {name: values[LABELS:] for name, values in data.train.items()}
    plain = masked(rest, mask)
    results: Results = {}
    for name, pretraining in (("masked only", plain), ("with next sentence", with_next_sentence(plain, rest))):

        def part(name: str = name, pretraining: Batch = pretraining) -> Results:
            ensemble = Ensemble(config, Variant(name), run.seeds, run.device)
            training = Training(run.steps(run.pick(250, 1200)), run.pick(32, 64), (3e-3,))
            ensemble.train(pretraining, training, Variant(name), run.seeds)
            before = ensemble.evaluate(masked(data.test, mask))["loss"]
            cells = fine_tune(run, ensemble, data, LABELS, name)
            return {name: cells[f"{name}|{LABELS}"] | {"masked loss": before}}

        results |= run.part(name, part)
    return results


EXPERIMENT = Experiment(
    name="next-sentence",
    title=Text("Next-sentence prediction", "下一句预测"),
    claim=Text("BERT learns relations between sentences by predicting whether one follows the other.",
               "BERT 通过预测两句是否相邻来学习句间关系。"),
    checklist=(121,),
    predictions=(
        Prediction(Text("It costs nothing in the masked loss", "掩码预测的损失不受影响"),
                   "masked loss", "with next sentence", "masked only", "same", 0.05),
        Prediction(Text("It helps on the very question it was trained on", "对它训练过的这个问题本身有帮助"),
                   "accuracy", "with next sentence", "masked only", "higher", 0.02),
    ),
    measure=measure,
    figures=(Figure("accuracy", Text("Neighboring lines: accuracy after fine-tuning", "相邻行判断：微调后的准确率")),),
    note=Text("Lines of Shakespeare's plays; a small model.", "莎士比亚戏剧的行；小模型。"),
    papers=("Devlin et al. 2019, table 5", "Liu et al. 2019, arXiv 1907.11692"),
    needs=("tinyshakespeare",),
)  # fmt: skip
