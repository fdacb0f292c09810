"""Characters against byte pairs of several sizes: loss per byte at equal steps and equal text."""

import math

from clearhead.lab.ensemble import Batch, Ensemble, Training, Variant
from clearhead.lab.experiment import Experiment, Figure, Prediction, Results, Text
from clearhead.lab.runner import Metrics, Run
from clearhead.lab.tasks import byte_pairs


def measure(run: Run) -> Results:
    """Cells are "tokens|vocabulary"; every row holds about the same number of bytes."""
    results: Results = {}
    for size in (256, 512, 1024, 4096):
        data, bytes_per_token = byte_pairs(size, run.pick(64, 128))
        base = {
            "family": "decoder",
            "decoder_layers": 2,
            "dim": run.pick(64, 96),
            "heads": 4,
            "position": "rotary",
            "tie": "output",
        }

        def after(ensemble: Ensemble, test: Batch = data.test, ratio: float = bytes_per_token) -> dict[str, Metrics]:
            losses = ensemble.evaluate(test)["loss"]
            return {
                "": {
                    "bits per byte": [loss / ratio / math.log(2) for loss in losses],
                    "bytes per token": [ratio] * len(losses),
                }
            }

        training = Training(run.pick(150, 500), 16, (2e-3, 6e-3))
        variants = [Variant(f"tokens|{size}", {"vocab_size": data.vocab_size})]
        results |= run.compare(base, variants, data.train, data.valid, {"": data.test}, training, after)
    return results


EXPERIMENT = Experiment(
    name="tokenizers",
    title=Text("Tokenizer and vocabulary size", "分词器与词表大小"),
    claim=Text("The tokenizer decides how much text fits into the context and what it costs.",
               "分词器决定上下文能装下多少文本、代价如何。"),
    checklist=(107, 108, 128, 129),
    predictions=(
        Prediction(Text("4,096 tokens: more than twice the bytes per token of 256", "词表 4096：每个 token 的字节数是 256 的两倍以上"),
                   "bytes per token", "tokens|4096", "tokens|256", "higher", 1.0, relative=True, exact=True),
        Prediction(Text("Larger vocabulary: fewer bits per byte after equally many steps", "词表更大：同样步数后每字节比特更少"),
                   "bits per byte", "tokens|1024", "tokens|256", "lower", 0.1),
    ),
    measure=measure,
    figures=(Figure("bits per byte", Text("Bits per byte", "每字节比特数"), Text("vocabulary", "词表大小"), log_x=True),
             Figure("bytes per token", Text("Bytes per token", "每个 token 的字节数"), Text("vocabulary", "词表大小"), log_x=True)),
    note=Text("Rows of equal text, so larger vocabularies take shorter rows and less compute.", "每行文本量相同，因此词表越大，行越短、计算越少。"),
    needs=("tinyshakespeare",),
)  # fmt: skip
