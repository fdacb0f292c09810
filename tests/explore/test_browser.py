"""The page in a real browser: shown numbers equal the reference, nothing fails, everything works by keyboard."""

from __future__ import annotations

import itertools
import json
import math
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from fastapi import FastAPI

import clearhead.serve
from clearhead.config import preset
from clearhead.config.serve import ServeLimits
from clearhead.interpret import capture_attention
from clearhead.interpret.switches import Switch, effect_of, switched_off
from clearhead.interpret.trace import own_copy
from clearhead.model import build
from clearhead.predict import Model, load
from clearhead.serve.inspect import mount_inspect
from clearhead.serve.inspect.page import mount_page
from clearhead.text import ROLES, train
from tests.explore.browser import FULL, Server, Shown, browser, shown
from tests.explore.models import small

TEXT = "a man sees the dog"
MASKED = "a [MASK] sees the dog"
FAMILIES = {"translator": "encoder-decoder", "llama": "decoder", "bert": "encoder"}
VIEWS = {
    "translator": ("tokens", "attention", "steps", "next", "translate", "switches", "compare", "tour"),
    "llama": ("tokens", "attention", "steps", "next", "switches", "compare", "tour"),
    "bert": ("tokens", "attention", "steps", "switches", "understand", "compare", "tour"),
}
MODULES = {
    "translator": ("cross", "decoder.layers.1.cross_attention"),
    "llama": ("decoder", "decoder.layers.1.attention"),
    "bert": ("encoder", "encoder.layers.1.attention"),
}
PAGE = Path(clearhead.serve.__file__).parent / "page"
PROBLEM = "(text) => document.querySelector('main .problem')?.innerText.includes(text)"
FILL = """(text) => {
  const box = document.querySelector('textarea[name=text]');
  box.value = text;
  box.dispatchEvent(new Event('input', { bubbles: true }));
}"""


@pytest.fixture(scope="module")
def running() -> Iterator[Any]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def server(running: Any) -> Iterator[Server]:
    models = {name: small(name) for name in ("translator", "llama", "bert", "gpt")}
    found = Server(models | {"second": small("translator"), "other": small("bert")})
    yield found
    found.stop()


def ids_of(name: str) -> list[torch.Tensor]:
    """What the network reads for the text, computed without the page's routes."""
    model = small(name)
    if name == "bert":
        inspection = model.inspect(MASKED)
    elif name == "translator":
        inspection = model.inspect(TEXT, "the dog sees")
    else:
        inspection = model.inspect(TEXT)
    return [torch.tensor([side.ids]) for side in (inspection.source, inspection.target) if side is not None]


def trace_of(name: str) -> Any:
    with capture_attention(small(name).network) as traces, torch.no_grad():
        small(name).network(*ids_of(name))
    return traces[MODULES[name][1]]


def state_of(name: str, view: str, **more: Any) -> dict[str, Any]:
    state = {"m": name, "v": view, "t": MASKED if name == "bert" else TEXT, **more}
    return state | ({"y": "the dog sees"} if name == "translator" else {})


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


def test_all_views_by_keyboard_alone(running: Any, server: Server) -> None:
    page = shown(running, server.url)
    page.open(**state_of("translator", "tokens"))
    keyboard = page.page.keyboard
    for _ in range(40):
        keyboard.press("Tab")
        if page.page.evaluate("document.activeElement.id") == "tab-tokens":
            break
    for view in (*VIEWS["translator"][1:], "tokens", "attention"):
        keyboard.press("ArrowRight")
        page.page.wait_for_selector(f"#tab-{view}[aria-selected=true]")
        page.settle()
        assert page.page.evaluate("document.activeElement.id") == f"tab-{view}"
    for _ in range(80):  # on to the first small picture, then into it
        keyboard.press("Tab")
        if page.page.evaluate("document.activeElement.className") == "thumb":
            break
    keyboard.press("ArrowRight")
    keyboard.press("Enter")
    page.page.wait_for_selector("canvas[data-name=head]", state="attached")
    page.page.wait_for_selector(".heatmap .over")
    page.page.locator(".heatmap .over").focus()
    for key in ("ArrowRight", "ArrowDown", "ArrowRight"):
        keyboard.press(key)
    page.page.wait_for_selector(".side .cell-value strong")
    page.page.locator("h2").click()
    for _ in range(3):
        keyboard.press("Escape")
    page.page.wait_for_selector(".overview")
    assert page.problems == []
    page.page.context.close()


def test_a_url_reproduces_the_view_and_back_goes_back(running: Any, server: Server) -> None:
    page = shown(running, server.url)
    page.open(**state_of("llama", "attention"))
    page.page.locator(".thumb").nth(5).click()
    page.page.wait_for_selector(".head-view")
    page.settle()
    url, title = page.page.url, page.text("h2")
    again = shown(running, server.url)
    again.page.goto(url)
    again.settle()
    assert again.text("h2") == title
    page.page.go_back()
    page.page.wait_for_selector(".overview")
    for each in (page, again):
        assert each.problems == []
        each.page.context.close()


@pytest.mark.parametrize("language", ["en", "zh"])
def test_bad_input_is_a_message_in_the_page(running: Any, server: Server, language: str) -> None:
    words = json.loads((PAGE / f"messages/{language}.json").read_text("utf-8"))
    page = shown(running, server.url, language=language)
    page.open(m="llama", v="attention", t=TEXT)
    box = page.page.locator("textarea[name=text]")

    def problem(key: str, **values: str) -> None:
        expected = words[key].format(**values)
        page.page.wait_for_function(PROBLEM, arg=expected, timeout=30_000)

    box.fill("")
    problem("error.empty")
    box.fill("dog " * 50_000)
    count = len(small("llama").prompt_ids("dog " * 50_000))
    problem("error.too_long", tokens=f"{count:,}", limit="128")
    page.page.evaluate(FILL, "x" * 10_000_000)
    problem("error.too_large", limit=f"{ServeLimits().max_body_bytes:,}")
    box.fill(TEXT)
    page.page.wait_for_selector(".overview")
    page.open(m="llama", v="understand", t=TEXT)
    banner = words["error.no_view"].format(view=words["view.understand"], family=words["family.decoder"])
    assert page.text(".banner") == banner
    page.page.context.close()


def test_a_model_without_tokenizer_or_with_nan_is_a_message_in_the_page(running: Any) -> None:
    broken = Model(own_copy(small("gpt").network), small("gpt").own_tokenizers, {}, "broken")
    layer = broken.network.decoder.layers[0].feed_forward.up
    layer.weight = torch.nn.Parameter(torch.full_like(layer.weight, math.nan))
    server = Server({"bare": Model(small("gpt").network, (), {}, "bare"), "broken": broken}, create=page_only)
    try:
        page = shown(running, server.url)
        for name, words in (("bare", "has no tokenizer"), ("broken", "contain NaN")):
            page.page.goto("about:blank")
            page.page.goto(f"{server.url}#m={name}&v=attention&t=a+man")
            page.page.wait_for_selector("main .problem[role=alert]")
            assert words in page.text("main .problem")
            assert page.page.locator(".banner").count() == 0
        page.page.context.close()
    finally:
        server.stop()


def test_a_slider_walks_over_the_checkpoints_of_a_run(running: Any) -> None:
    names = {"run": "llama", "run step-10": "gpt", "run step-200": "llama"}
    server = Server({name: small(each) for name, each in names.items()})
    try:
        page = shown(running, server.url)
        page.open(m="run", v="compare", t=TEXT, o="run step-10")
        slider = page.page.locator(".compare-with input[type=range]")
        for key, step, name in (("ArrowRight", "200", "llama"), ("ArrowLeft", "10", "gpt")):
            slider.press(key)
            page.page.wait_for_function(
                "(step) => document.querySelector('.compare-with output').innerText == step", arg=step
            )
            page.page.wait_for_selector(f".samples h3:has-text('run step-{step}')")
            page.settle()
            with torch.no_grad():
                logits = small(name).network(*ids_of(name))[0]
            loss = float(torch.nn.functional.cross_entropy(logits[:-1].double(), ids_of(name)[0][0, 1:]))
            assert page.page.locator(".compare-loss dd").nth(1).inner_text() == f"{loss:.3f}"
        assert page.problems == []
        page.page.context.close()
    finally:
        server.stop()


def page_only(models: Any) -> FastAPI:
    """The page on an app of one's own; `clearhead serve` and `explore` refuse a model without tokenizer."""
    app = FastAPI()
    mount_inspect(app, models)
    mount_page(app)
    return app


@pytest.mark.parametrize(("name", "language"), [("translator", "zh"), ("llama", "en"), ("bert", "zh")])
def test_every_stop_of_the_tour_is_measured(running: Any, server: Server, name: str, language: str) -> None:
    page = shown(running, server.url, language=language)
    page.open(m=name, v="tour", n=0, t=MASKED if name == "bert" else TEXT)
    stops = page.page.locator(".stops li").count()
    assert stops == 15
    for number in range(stops):
        page.page.locator(".guess").nth(number % 3).click()
        page.page.wait_for_selector(".measured")
        text = page.text(".measured")
        assert re.search(r"\d", text) or "“" in text
        assert not re.search(r"undefined|NaN|null|–|\{", text), text
        assert page.page.locator(".guess.right").count() == 1
        if number < stops - 1:
            page.page.locator(".walk button").nth(1).click()
            page.page.wait_for_selector(".guess:not(.right)")
            page.page.wait_for_function("() => !document.querySelector('.measured')")
    assert page.problems == []
    page.page.context.close()


def test_the_page_survives_a_restart_of_the_server(running: Any) -> None:
    server = Server({"gpt": small("gpt")})
    page = shown(running, server.url)
    page.open(m="gpt", v="attention", t=TEXT)
    server.stop()
    page.page.locator("textarea[name=text]").fill("two dogs see")
    page.page.wait_for_selector(".problem")
    server.start()
    try:
        page.page.wait_for_selector(".overview", timeout=20_000)
        page.settle()
        assert page.page.locator(".problem").count() == 0
    finally:
        server.stop()
        page.page.context.close()


def test_the_export_opens_from_disk_and_shows_the_same_numbers(running: Any, server: Server, tmp_path: Path) -> None:
    page = shown(running, server.url)
    page.open(**state_of("llama", "attention", k="decoder", l=1, h=1, r=2, c=1))
    number = page.number(".readout .cell strong")
    with page.page.expect_download() as download:
        page.page.locator("header button", has_text="Export").click()
    file = tmp_path / "export.html"
    download.value.save_as(file)
    copy = shown(running, "file://")
    copy.page.goto(file.as_uri())
    copy.settle()
    assert copy.number(".readout .cell strong") == number == f"{float(trace_of('llama').weights[0, 1, 2, 1]):.4f}"
    assert copy.page.locator(".side .code .marked").count() == 1
    for view, selector in (
        ("steps", ".chain"),
        ("tokens", ".token"),
        ("next", ".distribution"),
        ("switches", ".board"),
    ):
        copy.page.locator(f"#tab-{view}").click()
        copy.page.wait_for_selector(selector)
        copy.settle()
        assert copy.page.locator("main .problem").count() == (view == "tokens")  # a word in contexts is asked live
    copy.page.locator("button[lang=zh-CN]").click()
    copy.page.wait_for_function("document.documentElement.lang == 'zh-CN'")
    assert copy.problems == []
    assert copy.foreign == []
    for each in (page, copy):
        each.page.context.close()


@pytest.mark.parametrize("form", ["svg", "png"])
def test_pictures_are_saved(running: Any, server: Server, tmp_path: Path, form: str) -> None:
    page = shown(running, server.url)
    page.open(**state_of("translator", "attention", k="cross", l=1, h=1))
    with page.page.expect_download() as download:
        page.page.locator(".tools button", has_text=form.upper()).click()
    file = tmp_path / f"picture.{form}"
    download.value.save_as(file)
    data = file.read_bytes()
    if form == "png":
        assert data.startswith(b"\x89PNG")
        assert len(data) > 1000
    else:
        text = data.decode()
        assert text.startswith("<svg xmlns")
        assert text.count("<rect") > math.prod(trace_of("translator").weights.shape[2:])
        assert ">·sees</text>" in text
        ElementTree.fromstring(text)
    assert page.problems == []
    page.page.context.close()


def test_a_beam_can_be_forced_and_a_token_taken(running: Any, server: Server) -> None:
    page = shown(running, server.url)
    page.open(**state_of("translator", "translate", s="beam"))
    node = page.page.locator(".node.kept").nth(2)
    piece = node.locator(".piece").inner_text()
    start = time.perf_counter()
    node.click()
    page.page.wait_for_selector(".beam-options .piece")
    page.page.wait_for_function("() => !document.querySelector('.stale')")
    print(f"forced beam: {1000 * (time.perf_counter() - start):.0f} ms")
    assert page.text(".beam-options .piece").startswith(piece.strip())
    page.open(**state_of("llama", "next"))
    before = page.page.locator(".strip .token").count()
    page.page.locator(".take:enabled").first.click()
    page.page.wait_for_function(f"() => document.querySelectorAll('.strip .token').length == {before + 1}")
    assert page.problems == []
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
