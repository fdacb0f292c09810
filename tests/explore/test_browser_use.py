"""The page in use, in a real browser: keys, links, bad input, restarts, checkpoints, tour, exports, pictures."""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from fastapi import FastAPI

import clearhead.serve
from clearhead.config.serve import ServeLimits
from clearhead.interpret.trace import own_copy
from clearhead.predict import Model
from clearhead.serve.inspect import mount_inspect
from clearhead.serve.inspect.page import mount_page
from tests.explore.browser import Server, shown
from tests.explore.models import small
from tests.explore.shown_texts import MASKED, TEXT, VIEWS, ids_of, state_of, trace_of

PAGE = Path(clearhead.serve.__file__).parent / "page"
PROBLEM = "(text) => document.querySelector('main .problem')?.innerText.includes(text)"
FILL = """(text) => {
  const box = document.querySelector('textarea[name=text]');
  box.value = text;
  box.dispatchEvent(new Event('input', { bubbles: true }));
}"""


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
