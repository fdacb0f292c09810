"""The causal mask before the softmax (−∞) or after it (0)."""

import torch

from clearhead.lab.ensemble import Batch, Ensemble, Forward, Variant, to_device
from clearhead.lab.experiment import Experiment, Figure, Prediction, Results, Text
from clearhead.lab.parts import MaskAfterSoftmax, swap
from clearhead.lab.runner import Metrics, Run
from clearhead.lab.setups import character_model
from clearhead.model.attention import Attention
from clearhead.ops.attention import attention_with_weights
from clearhead.ops.masks import Mask


def change_of_the_past(ensemble: Ensemble, batch: Batch) -> list[float]:
    """Change the second half of each row; return the largest change of the logits in the first half."""
    batch = to_device({name: values[:64] for name, values in batch.items()}, ensemble.device)
    half = batch["ids"].shape[1] // 2

    def difference(forward: Forward, batch: Batch) -> torch.Tensor:
        other = torch.cat([batch["ids"][:, :half], batch["ids"].flip(0)[:, half:]], 1)
        return (forward(batch) - forward(batch | {"ids": other}))[:, :half].abs().flatten().max()

    return ensemble.map(difference, batch).tolist()


def row_sums(run: Run) -> Results:
    """The smallest sum of a row of weights, for both orders."""
    q, k = torch.randn(2, 1, 1, 16, 8)
    after = MaskAfterSoftmax.attend(None, q, k, torch.ones_like(k), Mask(causal=True))  # type: ignore[arg-type]
    sums = (("before", attention_with_weights(q, k, k, Mask(causal=True))[1].sum(-1)), ("after", after[..., 0]))
    return {f"sums, {name}": {"smallest sum": [sum_.min().item()] * len(run.seeds)} for name, sum_ in sums}


def measure(run: Run) -> Results:
    """Train with both orders."""
    setup = character_model(run)
    variants = (Variant("before"), Variant("after", change=swap(Attention, MaskAfterSoftmax)))

    def after(ensemble: Ensemble) -> dict[str, Metrics]:
        return {"": {"leak": change_of_the_past(ensemble, setup.data.test)}}

    return run.part("row sums", lambda: row_sums(run)) | setup.compare(run, variants, after=after)


EXPERIMENT = Experiment(
    name="mask-order",
    title=Text("Mask before or after the softmax", "softmax 之前还是之后做掩码"),
    claim=Text("Weights set to 0 after the softmax no longer sum to 1, so masked scores are set to −∞ before it.",
               "softmax 之后再置 0，权重之和不再为 1，所以要在之前把分数设为 −∞。"),
    checklist=(47, 51, 52, 53, 149),
    predictions=(
        Prediction(Text("Masked after: rows sum to less than 1", "之后做掩码：行和小于 1"),
                   "smallest sum", "sums, after", 1.0, "lower", 0.1, exact=True),
        Prediction(Text("Masked after: the future still leaks through the denominator", "之后做掩码：未来仍经分母泄漏"),
                   "leak", "after", "before", "higher", 1e-3),
        Prediction(Text("Masked before: no leak at all", "之前做掩码：完全不泄漏"), "leak", "before", 0.0, "same", 1e-4),
        Prediction(Text("The trained losses hardly differ", "训练后的损失几乎相同"), "loss", "after", "before", "same", 0.05),
    ),
    measure=measure,
    figures=(Figure("loss", Text("Test loss", "测试损失")),
             Figure("leak", Text("Change of earlier logits when later tokens change", "后文改变时前文 logits 的变化"))),
    note=Text("Masked after the softmax, the model learns to read the next token from the sum that remains, so its loss is worth nothing.",
              "在 softmax 之后做掩码，模型会学着从剩下的权重之和读出下一个 token，所以它的低损失毫无意义。"),
    needs=("tinyshakespeare",),
)  # fmt: skip
