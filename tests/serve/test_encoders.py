"""Embeddings and encoder tasks: results are the local ones, also when requests are batched together."""

import base64
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import numpy as np
import openai
import pytest
from langchain_openai import OpenAIEmbeddings

from clearhead.predict import Model
from tests.predict.task_models import task_model
from tests.serve.running import Running, serving

TEXTS = ["a man in a red shirt", "a dog is running", "two girls play in the park", "a man and a dog"]


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    return {
        "fill": task_model("lm", "wordpiece"),
        "classify": task_model("classes"),
        "tag": task_model("tags"),
        "answer": task_model("span"),
    }


@pytest.fixture(scope="module")
def tasks(models: dict[str, Model]) -> Iterator[Running]:
    with serving(models) as running:
        yield running


def post(running: Running, path: str, **body: Any) -> Any:
    with running.client() as client:
        answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


def close(found: Any, expected: Any) -> None:
    """Compare nested results; scores may differ in the last digits."""
    if isinstance(expected, dict):
        assert set(found) == set(expected)
        for key in expected:
            close(found[key], expected[key])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            close(*pair)
    else:
        assert found == (pytest.approx(expected, abs=1e-5) if isinstance(expected, float) else expected)


def test_openai_embeds_in_both_encodings(running: Running, packaged: dict[str, Model]) -> None:
    client = openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0)
    local = packaged["novels-bert"].embed(TEXTS)
    for encoding in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        answer = client.embeddings.create(model="novels-bert", input=TEXTS, **encoding)
        vectors = [
            np.frombuffer(base64.b64decode(each.embedding), "<f4")
            if isinstance(each.embedding, str)
            else np.array(each.embedding)
            for each in answer.data
        ]
        assert np.allclose(np.stack(vectors), local, atol=1e-5)
        assert answer.usage.prompt_tokens > len(TEXTS)
    assert client.embeddings.create(model="novels-bert", input="a", dimensions=256).data[0].index == 0
    with pytest.raises(openai.BadRequestError, match="256"):
        client.embeddings.create(model="novels-bert", input="a", dimensions=64)


def test_langchain_embeds(running: Running, packaged: dict[str, Model]) -> None:
    embeddings = OpenAIEmbeddings(
        model="novels-bert", base_url=running.url + "/v1", api_key="none", check_embedding_ctx_length=False
    )
    assert np.allclose(embeddings.embed_query(TEXTS[0]), packaged["novels-bert"].embed(TEXTS[0]), atol=1e-5)


def test_similar_ranks_texts(running: Running, packaged: dict[str, Model]) -> None:
    found = post(running, "/v1/similar", query=TEXTS[0], texts=TEXTS, top=3)
    close(found, [[each.to_dict() for each in packaged["novels-bert"].similar(TEXTS[0], TEXTS, top=3)]])


def test_fill(tasks: Running, models: dict[str, Model]) -> None:
    texts = ["a [MASK] in a shirt", "[MASK] and [MASK]"]
    close(post(tasks, "/v1/fill", input=texts, top=3), [each.to_dict() for each in models["fill"].fill(texts, 3)])


def test_classify(tasks: Running, models: dict[str, Model]) -> None:
    local = [each.to_dict() for each in models["classify"].classify(TEXTS)]
    close(post(tasks, "/v1/classify", input=TEXTS), local)
    close(post(tasks, "/v1/classify", input=TEXTS[1]), local[1:2])


def test_regression_gives_values() -> None:
    model = task_model("classes")
    model.extra["task"] = "regression"
    with serving({"score": model}) as running:
        found = post(running, "/v1/classify", input=TEXTS)
    close(found, [{"value": value} for value in model.regress(TEXTS)])


def test_tag(tasks: Running, models: dict[str, Model]) -> None:
    close(post(tasks, "/v1/tag", input=TEXTS), [each.to_dict() for each in models["tag"].tag(TEXTS)])


def test_answer(tasks: Running, models: dict[str, Model]) -> None:
    context = "a man in a red shirt and a dog are in the park"
    local = models["answer"].answer(["who ?", "where ?"], context, top=2)
    close(
        post(tasks, "/v1/answer", question=["who ?", "where ?"], context=context, top=2),
        [each.to_dict() for each in local],
    )


def test_requests_of_one_batch_do_not_change_or_fail_each_other(tasks: Running, models: dict[str, Model]) -> None:
    texts = [*TEXTS * 4, "", "a " * 100, *TEXTS]

    def classify(text: str) -> tuple[int, Any]:
        with tasks.client() as client:
            answer = client.post("/v1/classify", json={"input": text})
            return answer.status_code, answer.json()

    with futures.ThreadPoolExecutor(len(texts)) as pool:
        found = list(pool.map(classify, texts))
    for text, (status, answer) in zip(texts, found, strict=True):
        if text in TEXTS:
            close(answer["data"], [models["classify"].classify(text).to_dict()])
        else:
            assert status == 400
            assert answer["error"]["message"].startswith("text 1: ")


def test_many_requests_share_a_pass() -> None:
    model = task_model("classes")
    with serving({"classify": model}, batch_wait_ms=200) as running:
        served, passes = running.registry.get("classify"), []
        run = served.batcher._run_call
        served.batcher._run_call = lambda call, items: passes.append(len(items)) or run(call, items)
        with futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda text: post(running, "/v1/classify", input=text), TEXTS * 2))
    assert sum(passes) == 8
    assert len(passes) <= 4


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("embeddings", {"input": []}, "input"),
        ("embeddings", {"input": [1, 2]}, "input"),
        ("embeddings", {"input": ["a"] * 257}, "input"),
        ("embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ("similar", {"query": "a", "texts": [], "model": "fill"}, "texts"),
        ("similar", {"query": "a", "texts": ["b"], "top": 101, "model": "fill"}, "top"),
        ("fill", {"input": "[MASK]", "top": 0}, "top"),
        ("fill", {"input": "[MASK]", "model": "tag"}, "model"),
        ("classify", {"input": ["a", "b"], "pair": ["c"]}, "pair"),
        ("answer", {"question": ["a", "b"], "context": ["c"]}, "context"),
        ("answer", {"question": "a"}, "context"),
    ],
)
def test_wrong_requests_are_named(tasks: Running, path: str, body: dict[str, Any], param: str) -> None:
    with tasks.client() as client:
        answer = client.post(f"/v1/{path}", json={"model": path} | body if path == "classify" else body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].split(".")[0] == param
