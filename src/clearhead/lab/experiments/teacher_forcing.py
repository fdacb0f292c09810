"""Teacher forcing, free running and scheduled sampling."""

import torch

from clearhead.lab.ensemble import Batch, Forward, Variant, greedy
from clearhead.lab.experiment import Experiment, Figure, Prediction, Results, Text
from clearhead.lab.runner import Run
from clearhead.lab.setups import bleu_after, translator
from clearhead.lab.tasks import BEGIN


def free_running(forward: Forward, batch: Batch) -> Batch:
    """Replace the decoder's input by its own greedy output."""
    generated = greedy(forward, batch, BEGIN, batch["ids"].shape[1] - 1)
    return batch | {"ids": torch.cat([batch["ids"][:, :1], generated], 1)}


def scheduled(share: float) -> object:
    """Replace a share of the input tokens by the model's own prediction from the right history (two passes)."""

    def mix(forward: Forward, batch: Batch) -> Batch:
        predicted = forward(batch).argmax(-1)[:, :-1]
        ids = batch["ids"]
        own = torch.rand(predicted.shape, device=ids.device) < share
        return batch | {"ids": torch.cat([ids[:, :1], torch.where(own, predicted, ids[:, 1:])], 1)}

    return mix


def measure(run: Run) -> Results:
    """Train with three kinds of history."""
    setup, translation = translator(run)
    training = setup.training
    setup = setup._replace(training=type(training)(run.pick(100, 300), training.batch, training.lrs))
    variants = (
        Variant("teacher forcing"),
        Variant("scheduled sampling", inputs=scheduled(0.25)),  # type: ignore[arg-type]
        Variant("free running", inputs=free_running),
    )
    return setup.compare(run, variants, after=bleu_after(run, translation))


EXPERIMENT = Experiment(
    name="teacher-forcing",
    title=Text("Teacher forcing", "教师强制"),
    claim=Text("Without teacher forcing training does not work; scheduled sampling helps.",
               "没有教师强制就训练不动；计划采样有帮助。"),
    checklist=(23, 24, 26, 27, 150),
    predictions=(
        Prediction(Text("Free running: lower BLEU", "自由运行：BLEU 更低"), "bleu", "free running", "teacher forcing", "lower", 1.0),
        Prediction(Text("Free running: much slower training", "自由运行：训练慢得多"),
                   "train seconds", "free running", "teacher forcing", "higher", 1.0, relative=True),
        Prediction(Text("Scheduled sampling: no difference in BLEU", "计划采样：BLEU 没有差别"),
                   "bleu", "scheduled sampling", "teacher forcing", "same", 1.5),
    ),
    measure=measure,
    figures=(Figure("bleu", Text("BLEU", "BLEU")), Figure("loss", Text("Test loss with the right history", "正确历史下的测试损失"))),
    note=Text("In the quick size no translation is good enough for BLEU; compare the losses.", "快速规模下，译文质量还达不到能用 BLEU 衡量的程度，请比较损失。"),
    papers=("Bengio et al. 2015, arXiv 1506.03099", "Mihaylova and Martins 2019, arXiv 1906.07651"),
    needs=("tatoeba_en_de",),
)  # fmt: skip
