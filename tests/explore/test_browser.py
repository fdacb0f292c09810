"""The page in a real browser: every view shows the numbers of the reference; its own timings."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from clearhead.config import preset
from clearhead.interpret import capture_attention
from clearhead.interpret.switches import Switch, effect_of, switched_off
from clearhead.interpret.trace import own_copy
from clearhead.model import build
from clearhead.predict import Model, load
from clearhead.text import ROLES, train
from tests.explore.browser import FULL, Server, Shown, shown
from tests.explore.models import small
from tests.explore.shown_texts import MODULES, TEXT, VIEWS, ids_of, state_of, trace_of


def percent(x: float, digits: int) -> str:
    """As the page writes a share: what is not nothing is not 0%, what is not all is not 100%."""
    text, least = f"{100 * x:.{digits}f}", 10**-digits
    if x > 0 and float(text) == 0:
        return f"<{least:.{digits}f}%"
    return f">{100 - least:.{digits}f}%" if x < 1 and float(text) == 100 else f"{text}%"


# The number that each view shows, and its recomputation


def tokens(page: Shown, name: str) -> None:
    shown_ids = page.page.locator(".token .id").all_inner_texts()
    assert shown_ids == [str(token) for row in ids_of(name) for token in row[0].tolist()]
    page.page.locator(".token").nth(1).click()
    page.page.wait_for_selector(".side .facts-list")
    assert page.page.locator(".side .facts-list dd").nth(1).inner_text() == shown_ids[1]


def attention(page: Shown, name: str) -> None:
    kind = MODULES[name][0]
    effects = "() => [...document.querySelectorAll('.thumb-effect')].every((each) => each.innerText)"
    page.open(**state_of(name, "attention", k=kind))
    page.page.wait_for_function(effects, timeout=30_000)
    shown_effects = page.page.locator(".thumb-effect").all_inner_texts()
    with capture_attention(small(name).network) as traces, torch.no_grad():
        small(name).network(*ids_of(name))
    modules = [MODULES[name][1].replace(".1.", f".{layer}.") for layer in range(2)]
    peaks = torch.cat([traces[module].weights[0].amax(-1).mean(-1) for module in modules])  # of all heads
    largest, smallest = page.page.locator("ul.facts-list li").all_inner_texts()[-2:]
    assert (f"{100 * float(peaks.max()):.0f}%" in largest, f"{100 * float(peaks.min()):.0f}%" in smallest) == (
        True,
        True,
    )
    page.open(**state_of(name, "attention", k=kind, l=1, h=1, r=2, c=1))
    assert page.number(".readout .cell strong") == f"{float(trace_of(name).weights[0, 1, 2, 1]):.4f}"
    off = page.number(".effect dd").split()[0]
    assert off == f"{float(effect_without(name, kind, 1, 1)):.4f}"
    assert float(shown_effects[5].strip("<")) == pytest.approx(float(off), abs=0.001)  # 4 heads a layer


def steps(page: Shown, name: str) -> None:
    trace, group = trace_of(name), len(trace_of(name).q[0]) // len(trace_of(name).k[0])
    page.open(**state_of(name, "steps", k=MODULES[name][0], l=1, h=1, s="scores", r=2, c=1))
    score = float(trace.q[0, 1, 2] @ trace.k[0, 1 // group, 1])
    assert page.number(".chain .cell strong") == f"{score:.4f}"
    page.page.wait_for_selector(".side .cell-value strong")
    assert page.number(".side .cell-value strong") == f"{score:.4f}"


def next_token(page: Shown, name: str) -> None:
    with torch.no_grad():
        probs = small(name).network(*ids_of(name))[0, -1].softmax(-1)
    first = page.page.locator(".distribution .num").first
    token = int(first.get_attribute("data-id"))
    assert token == int(probs.argmax())
    assert first.inner_text() == percent(float(probs[token]), 2)


def translate(page: Shown, name: str) -> None:
    from clearhead.inference.alignment import alignment_weights
    from clearhead.predict.align import alignment_heads, source_words, target_words, word_weights

    model, (source, target) = small(name), ids_of(name)
    weights = alignment_weights(
        model.network, source[0].tolist(), target[0, :1].tolist(), target[0, 1:].tolist(), alignment_heads(model)
    )
    words = target_words(model.tokenizer, target[0, 1:].tolist())
    table = word_weights(weights, source_words(model, TEXT), words)
    page.open(**state_of(name, "translate", s="align", r=1, c=2))
    assert page.number(".head-facts .cell strong") == f"{float(table[1, 2]):.4f}"
    page.open(**state_of(name, "translate", s="beam"))
    best = model.translate(TEXT, beam=4, logprobs=True)
    assert page.number(".hypotheses .num") == f"{best.score:.4f}"
    page.open(**state_of(name, "translate", s="forced"))
    logprobs = model.logits(source, target)[0].log_softmax(-1)
    label = int(target[0, 1])
    assert page.page.locator(".forced tbody .num").first.inner_text() == percent(math.exp(logprobs[0, label]), 1)


def effect_without(name: str, stack: Any, layer: int, head: int) -> float:
    """KL divergence of the predictions with and without a head, by two passes of the network."""
    network, ids = own_copy(small(name).network), ids_of(name)
    with torch.no_grad():
        before = network(*ids)[0]
        with switched_off(network, [Switch("head", stack, layer, head)]):
            return effect_of(before, network(*ids)[0], None).divergence


def switches(page: Shown, name: str) -> None:
    stack = MODULES[name][0]
    page.open(**state_of(name, "switches", off=f"head.{stack}.1.1"))
    assert page.number(".outcome dd").split()[0] == f"{effect_without(name, stack, 1, 1):.4f}"


def understand(page: Shown, name: str) -> None:
    model, (ids,) = small(name), ids_of(name)
    with torch.no_grad():
        position = int((ids[0] == model.tokenizer.id("mask")).nonzero()[0, 0])
        best = float(model.network(ids)[0, position].softmax(-1).max())
    assert page.page.locator(".neighbors .num").first.inner_text() == percent(best, 1)


def compare(page: Shown, name: str) -> None:
    page.page.wait_for_selector(".samples .text-out")
    if name == "bert":
        assert page.page.locator(".compare-row").count() == 2
        assert page.page.locator(".samples .text-out").first.inner_text().endswith("%")
        return
    written = page.page.locator(".samples .text-out").first.inner_text()
    if name == "translator":
        assert small(name).translate(TEXT, max_new_tokens=99).text.startswith(written)
    with torch.no_grad():
        logits = small(name).network(*ids_of(name))[0]
    target = ids_of(name)[-1][0]
    end = small(name).special_tokens.eos_ids[0] if name == "translator" else -100
    labels = torch.tensor([*target[1:].tolist(), end])
    loss = float(torch.nn.functional.cross_entropy(logits.double(), labels))
    assert page.page.locator(".compare-loss dd").first.inner_text() == f"{loss:.3f}"


def tour(page: Shown, name: str) -> None:
    page.open(**state_of(name, "tour", n=5))
    page.page.locator(".guess").nth(1).click()
    page.page.wait_for_selector(".measured")
    measured = json.loads(page.page.locator(".measured").get_attribute("data-values"))
    assert (measured["low"], measured["high"]) == ("1.0000", "1.0000")
    assert page.page.locator(".guess.right").count() == 1


CHECKS: dict[str, Callable[[Shown, str], None]] = {
    "tokens": tokens, "attention": attention, "steps": steps, "next": next_token, "translate": translate,
    "switches": switches, "understand": understand, "compare": compare, "tour": tour,
}  # fmt: skip


def cases() -> list[tuple[str, str, str, int, str]]:
    """Every family × view, with languages, widths and themes in turn; all combinations where that is asked for."""
    pairs = [(name, view) for name, views in VIEWS.items() for view in views]
    looks = list(itertools.product(("en", "zh"), (1280, 400), ("light", "dark")))
    if FULL:
        return [(*pair, *look) for pair in pairs for look in looks]
    return [(*pair, *looks[(3 * number) % len(looks)]) for number, pair in enumerate(pairs)]


@pytest.mark.parametrize(("name", "view", "language", "width", "theme"), cases())
def test_a_view_shows_the_numbers_of_the_reference(
    running: Any, server: Server, name: str, view: str, language: str, width: int, theme: str
) -> None:
    page = shown(running, server.url, width=width, theme=theme, language=language)
    page.open(**state_of(name, view))
    assert page.page.locator(f"#tab-{view}[aria-selected=true]").count() == 1
    CHECKS[view](page, name)
    page.settle()
    assert page.page.locator("main .problem").all_inner_texts() == []
    assert page.problems == []
    assert page.foreign == []
    if view != "tour":
        assert page.text(".side .formula")
        page.page.wait_for_selector(".side .code .marked")
    assert page.page.evaluate("document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
    assert "\n".join(page.violations()) == ""
    page.keep(f"{view}-{name}-{language}-{width}-{theme}")
    page.page.context.close()


PAINTED = """() => {
  const watch = () => {
    if (document.querySelectorAll('.thumb canvas').length >= 144) window.paintedAt ??= performance.now();
    else requestAnimationFrame(watch);
  };
  requestAnimationFrame(watch);
}"""
HOVER = """() => {
  const canvas = document.querySelector('.heatmap .over'), box = canvas.getBoundingClientRect(), times = [];
  for (let i = 0; i < 200; i++) {
    const at = { clientX: box.left + box.width * (0.2 + 0.003 * i), clientY: box.top + box.height * (0.2 + 0.003 * i) };
    const start = performance.now();
    canvas.dispatchEvent(new PointerEvent('pointermove', { ...at, bubbles: true }));
    times.push(performance.now() - start);
  }
  return Math.max(...times);
}"""


@pytest.mark.skipif(not FULL, reason="takes long; with CLEARHEAD_BROWSER=full it prints its timings")
def test_timings_of_many_heads_and_long_texts(running: Any) -> None:
    """Printed, not asserted: they are those of this machine and its load."""
    server = Server({"large": large(), "en-de": load("en-de", "cpu")})
    page = shown(running, server.url)
    page.page.add_init_script(f"({PAINTED})()")
    page.open(m="large", v="attention", t=("a man sees the dog. " * 26)[:511])
    paint = page.page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime")
    arrived = "performance.getEntriesByType('resource').findLast(e => e.name.endsWith('inspect/trace')).responseEnd"
    overview = page.page.evaluate(f"window.paintedAt - {arrived}")
    page.open(m="large", v="attention", t=("a man sees the dog. " * 26)[:511], k="decoder", l=3, h=3)
    page.page.wait_for_selector(".heatmap .over")
    hover = page.page.evaluate(HOVER)
    page.open(m="en-de", v="attention", t="Two dogs are playing in the snow.")
    start = time.perf_counter()
    with page.page.expect_response(lambda response: response.url.endswith("inspect/trace")):
        page.page.locator("textarea[name=text]").fill("Two dogs are playing in the snow and a man sees them. " * 9)
    page.settle()
    typed = time.perf_counter() - start
    print(f"\nfirst paint {paint:.0f} ms, 512 tokens × 144 heads {overview:.0f} ms after the numbers, ", end="")
    page.open(m="en-de", v="translate", s="beam", t="Two dogs are playing in the snow.")
    with page.page.expect_response(lambda response: response.url.endswith("inspect/beam")) as answer:
        page.page.locator(".node.kept").nth(2).click()
    answer.value.finished()
    forced = answer.value.request.timing["responseEnd"]
    print(f"hover at most {hover:.1f} ms, 128 tokens shown {1000 * typed:.0f} ms after typing, ", end="")
    print(f"a forced branch answered after {forced:.0f} ms")
    assert page.problems == []
    server.stop()


def large() -> Model:
    """A random decoder of 12 layers × 12 heads that reads 512 tokens."""
    torch.manual_seed(0)
    tokenizer = train(["a man sees the dog. "] * 9, "char", 64, roles=ROLES)
    sizes = ["decoder_layers=12", "dim=96", "heads=12", "kv_heads=12", "head_dim=8", "ff_dim=96", "max_positions=512"]
    network = build(preset("tiny-llama", [*sizes, f"vocab_size={len(tokenizer)}"])).eval()
    return Model(network, (tokenizer,), {}, "large")
