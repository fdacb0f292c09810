"""Grouped-query attention: loss and size of the KV cache by number of key-value heads."""

from clearhead.lab.ensemble import Variant
from clearhead.lab.experiment import Experiment, Figure, Prediction, Results, Text
from clearhead.lab.runner import Run
from clearhead.lab.setups import character_model


def measure(run: Run) -> Results:
    """Cells are "kv heads|number"."""
    setup = character_model(run, heads=8)
    results = setup.compare(run, [Variant(f"kv heads|{heads}", {"kv_heads": heads}) for heads in (1, 2, 4, 8)])
    for heads in (1, 2, 4, 8):  # keys and values of each token, in fp32
        size = 2 * 4 * heads * (setup.base["dim"] // 8) * setup.base["decoder_layers"]
        results[f"kv heads|{heads}"]["cache bytes per token"] = [float(size)] * len(run.seeds)
    return results


EXPERIMENT = Experiment(
    name="grouped-query",
    title=Text("Grouped-query attention", "分组查询注意力"),
    claim=Text("Fewer key-value heads shrink the cache and hardly cost quality.", "减少键值头能缩小缓存，几乎不损失质量。"),
    checklist=(142,),
    predictions=(
        Prediction(Text("Two of eight: the loss is no different", "8 头中保留 2 个：损失没有差别"),
                   "loss", "kv heads|2", "kv heads|8", "same", 0.02),
        Prediction(Text("One of eight: the loss is higher", "只留 1 个：损失更高"), "loss", "kv heads|1", "kv heads|8", "higher", 0.01),
        Prediction(Text("Two of eight: a quarter of the cache", "8 头中保留 2 个：缓存为四分之一"),
                   "cache bytes per token", "kv heads|2", "kv heads|8", "lower", 0.7, relative=True, exact=True),
    ),
    measure=measure,
    figures=(Figure("loss", Text("Test loss", "测试损失"), Text("key-value heads", "键值头数"), log_x=True),
             Figure("cache bytes per token", Text("Cache per token in bytes", "每个 token 的缓存字节数"), Text("key-value heads", "键值头数"), log_x=True)),
    papers=("Ainslie et al. 2023, arXiv 2305.13245",),
    needs=("tinyshakespeare",),
)  # fmt: skip
