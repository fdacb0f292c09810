"""LibreTranslate's routes with its own client, and our options."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from libretranslatepy import LibreTranslateAPI

from clearhead.predict import Model, load
from clearhead.serve.keys import Keys
from tests.serve.running import Running, serving

TEXTS = ["Two dogs are playing in the snow.", "I like to read books.", "", "Where is the station?"]


@pytest.fixture(scope="module")
def translating(packaged: dict[str, Model]) -> Iterator[Running]:
    models = {"en-de": packaged["en-de"], "de-en": load("de-en", "cpu"), "chinese": load("zh-en", "cpu")}
    with serving(models) as running:
        yield running


def post(running: Running, **body: Any) -> Any:
    with running.client() as client:
        answer = client.post("/translate", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_libretranslates_client_translates(translating: Running, packaged: dict[str, Model]) -> None:
    client = LibreTranslateAPI(translating.url)
    assert client.translate(TEXTS[0], "en", "de") == packaged["en-de"].translate(TEXTS[0]).text
    assert client.translate("你好。", "zh", "en")
    assert {each["code"]: each["targets"] for each in client.languages()} == {"en": ["de"], "de": ["en"], "zh": ["en"]}
    for text, language in (("Wo ist der Bahnhof?", "de"), (TEXTS[0], "en"), ("他们在公园里。", "zh")):
        best, *others = client.detect(text)
        assert best["language"] == language
        assert best["confidence"] > 50 > max(each["confidence"] for each in others)


def test_the_key_can_be_in_the_body(packaged: dict[str, Model]) -> None:
    key = "0123456789abcdef"
    with serving({"en-de": packaged["en-de"]}, Keys([key])) as running:
        client = LibreTranslateAPI(running.url, key)
        assert client.translate(TEXTS[1], "en", "de")
        assert client.languages()
        with running.client() as other:
            body = {"q": "a", "source": "en", "target": "de"}
            assert other.post("/translate", json=body | {"api_key": key}).status_code == 200
            assert other.post("/translate", json=body | {"api_key": key + "x"}).status_code == 401
            assert other.post("/translate", json=body | {"api_key": [key]}).status_code == 401
            assert other.get("/languages", params={"api_key": key}).status_code == 200
            assert other.post("/v1/completions", json={"prompt": "a", "api_key": key}).status_code == 401


def test_lists_and_lines_are_translated_each(translating: Running, packaged: dict[str, Model]) -> None:
    local = [each.text for each in packaged["en-de"].translate(TEXTS)]
    assert post(translating, q=TEXTS, source="en", target="de") == {"translatedText": local}
    assert post(translating, q="\n".join(TEXTS), source="en", target="de") == {"translatedText": "\n".join(local)}


def test_beam_search_and_alternatives_are_the_local_ones(translating: Running, packaged: dict[str, Model]) -> None:
    local = packaged["en-de"].translate(TEXTS[0], beam=4)
    assert post(translating, q=TEXTS[0], source="en", target="de", beam=4)["translatedText"] == local.text
    answer = post(translating, q=TEXTS[0], source="en", target="de", alternatives=3)
    candidates = packaged["en-de"].translate(TEXTS[0], beam=4, n_best=4).candidates
    assert [answer["translatedText"], *answer["alternatives"]] == [each.text for each in candidates]


def test_the_source_language_is_detected(translating: Running) -> None:
    answer = post(translating, q=["他们在公园里。", "Wo ist der Bahnhof?"], target="en")
    assert [each["language"] for each in answer["detectedLanguage"]] == ["zh", "de"]
    assert all(answer["translatedText"])


def test_explanations_hold_alignment_and_alternatives(translating: Running, packaged: dict[str, Model]) -> None:
    answer = post(translating, q=TEXTS[0], source="en", target="de", explain=True)
    [line] = answer["explanation"]
    local = packaged["en-de"].translate(TEXTS[0], align=True).alignment
    assert local is not None
    assert line["alignment"]["links"] == [list(link) for link in local.links]
    assert line["alignment"]["target"] == list(local.target)
    assert "".join(token["text"] for token in line["tokens"]).strip() == answer["translatedText"]
    assert all(token["alternatives"][0]["id"] == token["id"] for token in line["tokens"])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"q": "a", "source": "en"}, "target"),
        ({"q": "a", "source": "xx", "target": "de"}, "source"),
        ({"q": "a", "source": "en", "target": "zh"}, "target"),
        ({"q": [], "source": "en", "target": "de"}, "q"),
        ({"q": "a\n" * 300, "source": "en", "target": "de"}, "q"),
        ({"q": "a", "source": "en", "target": "de", "format": "html"}, "format"),
        ({"q": "a", "source": "en", "target": "de", "beam": 0}, "beam"),
        ({"q": "a", "source": "en", "target": "de", "beam": 17}, "beam"),
        ({"q": "a", "source": "en", "target": "de", "model": "de-en"}, "source"),
    ],
)
def test_wrong_requests_are_named(translating: Running, body: dict[str, Any], param: str) -> None:
    with translating.client() as client:
        for kind in ({"json": body}, {"data": body}):
            if "data" in kind and isinstance(body["q"], list):
                continue
            answer = client.post("/translate", **kind)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"].split(".")[0] == param


def test_other_bodies_are_refused(translating: Running) -> None:
    with translating.client() as client:
        for content, kind in ((b"\xff=1", "application/x-www-form-urlencoded"), (b"[" * 9999, "application/json")):
            assert client.post("/translate", content=content, headers={"Content-Type": kind}).status_code == 400
        assert client.post("/translate", content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 415


def test_a_model_whose_languages_are_unknown_says_how_to_serve_it(packaged: dict[str, Model]) -> None:
    with serving({"mine": replace(packaged["en-de"], name="mine", folder=None)}) as running, running.client() as client:
        body = {"q": "Hi!", "source": "en", "target": "de", "model": "mine"}
        answer = client.post("/translate", json=body)
    assert answer.status_code == 400
    assert "like en-de" in answer.text
