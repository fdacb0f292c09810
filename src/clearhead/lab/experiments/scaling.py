"""Division by √d: softmax and its gradient at the start, and training with and without."""

import torch

from clearhead.lab.ensemble import Training, Variant
from clearhead.lab.experiment import Experiment, Figure, Prediction, Results, Text
from clearhead.lab.parts import UnscaledAttention, swap
from clearhead.lab.runner import Run
from clearhead.lab.setups import character_model
from clearhead.model.attention import Attention

DIMS = (16, 64, 256, 1024)


def saturation(run: Run) -> Results:
    """Random q and k of unit variance: variance of the logits, largest weight, gradient of the softmax."""
    results: Results = {}
    for dim in DIMS:
        for name, scale in (("scaled", dim**-0.5), ("unscaled", 1.0)):
            metrics: dict[str, list[float]] = {"logit variance": [], "largest weight": [], "gradient": []}
            for seed in run.seeds:
                torch.manual_seed(seed)
                q, k = torch.randn(200, dim), torch.randn(200, 32, dim)
                logits = ((k @ q[..., None])[..., 0] * scale).requires_grad_()
                weights = logits.softmax(-1)
                (gradient,) = torch.autograd.grad((weights * torch.randn_like(weights)).sum(), logits)
                values = (logits.var(), weights.max(-1).values.mean(), gradient.norm(dim=-1).mean())
                for key, value in zip(metrics, values, strict=True):
                    metrics[key].append(value.item())
            results[f"{name}|{dim}"] = metrics
    return results


def measure(run: Run) -> Results:
    """Saturation at the start, then training with one wide head, and queries of unit size (init normal × 50)."""
    setup = character_model(run, heads=1, init="xavier", norm_position="post", scale_embedding=True)
    training = Training(setup.training.steps, setup.training.batch, setup.training.lrs, warmup=0.0)
    variants = (Variant("trained scaled"), Variant("trained unscaled", change=swap(Attention, UnscaledAttention)))
    return run.part("at the start", lambda: saturation(run)) | setup._replace(training=training).compare(run, variants)


EXPERIMENT = Experiment(
    name="scaling",
    title=Text("Dividing by √d", "除以 √d"),
    claim=Text("Without division by √d, long vectors give large logits, a saturated softmax and small gradients.",
               "若不除以 √d，向量越长 logits 越大，softmax 饱和，梯度变小。"),
    checklist=(45, 47, 48, 49, 84, 89),
    predictions=(
        Prediction(Text("Scaled logits of 1,024 dimensions have variance 1", "1024 维时，缩放后 logits 的方差为 1"),
                   "logit variance", "scaled|1024", 1.0, "same", 0.1),
        Prediction(Text("Unscaled, one key takes almost all weight", "不缩放时，一个键几乎占去全部权重"),
                   "largest weight", "unscaled|1024", "scaled|1024", "higher", 0.5),
        Prediction(Text("Unscaled, the gradient shrinks", "不缩放时，梯度变小"),
                   "gradient", "unscaled|1024", "scaled|1024", "lower", 0.5, relative=True),
        Prediction(Text("Trained without scaling, the loss is higher", "不缩放训练，损失更高"),
                   "loss", "trained unscaled", "trained scaled", "higher", 0.02),
    ),
    measure=measure,
    figures=(
        Figure("gradient", Text("Gradient of the softmax by dimension", "不同维数下 softmax 的梯度"), Text("d", "d"),
               only=("scaled", "unscaled"), log_x=True),
        Figure("loss", Text("Loss after training", "训练后的损失"), only=("trained scaled", "trained unscaled")),
    ),
    papers=("Vaswani et al. 2017, section 3.2.1",),
    needs=("tinyshakespeare",),
)  # fmt: skip
