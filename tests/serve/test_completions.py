"""`/v1/completions` with the openai client: the served text is the local text."""

import json
import math
import re
from typing import Any

import openai
import pytest

from clearhead.predict import Model
from tests.serve.running import Running, serving

PROMPT = "It was a bright cold day"
OPTIONS = {"temperature": 0.9, "top_p": 0.95, "presence_penalty": 0.5, "frequency_penalty": 0.25}


@pytest.fixture
def client(running: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0)


def test_served_text_is_the_local_text(client: openai.OpenAI, packaged: dict[str, Model]) -> None:
    answer = client.completions.create(model="novels-gpt", prompt=PROMPT, max_tokens=24, seed=5, **OPTIONS)
    local = packaged["novels-gpt"].generate(PROMPT, seed=5, max_new_tokens=24, **OPTIONS)
    assert answer.choices[0].text == local.text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24
    assert answer.usage.prompt_tokens == len(packaged["novels-gpt"].prompt_ids(PROMPT))


def test_samples_and_lists_of_prompts_are_the_local_ones(client: openai.OpenAI, packaged: dict[str, Model]) -> None:
    prompts = [PROMPT, "She said"]
    answer = client.completions.create(
        model="novels-gpt", prompt=prompts, max_tokens=12, n=2, seed=7, stop=[" the", "."], **OPTIONS
    )
    local = packaged["novels-gpt"].generate(
        prompts, seed=7, max_new_tokens=12, samples=2, stop=[" the", "."], **OPTIONS
    )
    assert [choice.text for choice in answer.choices] == [each.text for row in local for each in row.candidates]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


def test_ids_are_used_as_they_are(client: openai.OpenAI, packaged: dict[str, Model]) -> None:
    ids = packaged["novels-gpt"].prompt_ids(PROMPT)
    texts = [
        client.completions.create(model="novels-gpt", prompt=prompt, max_tokens=8, temperature=0).choices
        for prompt in (PROMPT, ids, [ids, ids])
    ]
    assert {choice.text for row in texts for choice in row} == {texts[0][0].text}


def test_streamed_text_is_the_whole_text(client: openai.OpenAI, packaged: dict[str, Model]) -> None:
    options = {"model": "novels-gpt", "prompt": PROMPT, "max_tokens": 30, "seed": 3, "n": 2, "stop": ["and"]}
    whole = client.completions.create(**options)
    texts, reasons, usage = ["", ""], [None, None], None
    for chunk in client.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage


def test_logprobs_while_streaming_equal_those_at_the_end(client: openai.OpenAI, packaged: dict[str, Model]) -> None:
    options = {"model": "novels-gpt", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": 3}
    whole = client.completions.create(**options).choices[0]
    assert whole.logprobs is not None
    chunks: list[Any] = [chunk.choices[0].logprobs for chunk in client.completions.create(**options, stream=True)]
    assert [token for chunk in chunks for token in chunk.tokens] == whole.logprobs.tokens
    streamed = [logprob for chunk in chunks for logprob in chunk.token_logprobs]
    assert streamed == pytest.approx(whole.logprobs.token_logprobs, abs=1e-4)
    assert "".join(whole.logprobs.tokens) == whole.text
    assert whole.logprobs.text_offset[:2] == [0, len(whole.logprobs.tokens[0])]
    local = packaged["novels-gpt"].generate(PROMPT, max_new_tokens=12, logprobs=True)
    assert whole.logprobs.token_logprobs == pytest.approx(local.logprobs, abs=1e-4)
    for token, logprob, top in zip(whole.logprobs.tokens, streamed, whole.logprobs.top_logprobs, strict=True):
        assert len(top) == 3
        assert max(top, key=top.get) == token  # greedy
        assert top[token] == pytest.approx(logprob, abs=1e-4)
        assert sum(map(math.exp, top.values())) <= 1


def test_explanations_hold_the_alternatives(running: Running) -> None:
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "explain": True}
    with running.client() as client:
        tokens = client.post("/v1/completions", json=body).json()["choices"][0]["explanation"]["tokens"]
    assert len(tokens) == 4
    for token in tokens:
        assert len(token["alternatives"]) == 5
        assert token["alternatives"][0]["id"] == token["id"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": "a", "logit_bias": {"1": 2}}, "logit_bias"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [99999]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 5000}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 512}, "prompt"),
        ({"prompt": "a", "n": 17}, "n"),
        ({"prompt": "a", "n": "1"}, "n"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a", "stop": ["x"] * 17}, "stop"),
        ({"prompt": "a", "seed": -1}, "seed"),
        ({"prompt": "a", "seed": 2**62}, "seed"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "tools": []}, "tools"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "a", "model": "none"}, "model"),
        ({"prompt": "a", "model": "en-de"}, "model"),
        ({"prompt": "a", "model": ""}, "model"),
    ],
)
def test_wrong_requests_are_named(running: Running, body: dict, param: str) -> None:
    with running.client() as client:
        answer = client.post("/v1/completions", json=body)
    assert answer.status_code == (404 if body.get("model") == "none" else 400)
    error = answer.json()["error"]
    assert error["param"] is not None
    assert not re.search(r"constrained|validation|raw data", error["message"] + error["param"])
    assert error["param"].split(".")[0] == param


def test_what_is_not_json_is_refused(running: Running) -> None:
    wrong = [b"", b"{", b"null", b'"a"', b"[" * 100_000, b'{"prompt": "\\ud800"}', b'{"prompt": 1e999}', b"\xff"]
    wrong += [b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}"]
    with running.client() as client:
        for content in wrong:
            answer = client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
            assert answer.status_code == 400, content[:40]
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        form = client.post("/v1/completions", content=b'{"prompt": "a"}', headers={"Content-Type": "text/plain"})
        assert form.status_code == 400


def test_openais_errors_are_raised(client: openai.OpenAI, running: Running) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="none", prompt="a")
    with pytest.raises(openai.BadRequestError, match="positions"):
        client.completions.create(model="novels-gpt", prompt="a " * 600)
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model="novels-gpt", prompt="a", max_tokens=-1)


def test_the_chosen_seed_is_named(running: Running) -> None:
    body = {"prompt": PROMPT, "max_tokens": 12}
    with running.client() as client:
        first = client.post("/v1/completions", json=body).json()
        again = client.post("/v1/completions", json=body | {"seed": first["seed"]}).json()
        others = {client.post("/v1/completions", json=body).json()["seed"] for _ in range(3)}
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    assert len(others) == 3


def test_streams_are_kept_alive(packaged: dict[str, Model]) -> None:
    with serving({"gpt": packaged["novels-gpt"]}, keep_alive_seconds=0.001) as running, running.client() as client:
        body = {"prompt": "It", "max_tokens": 100, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = list(answer.iter_lines())
    assert ": keep-alive" in lines
    assert lines[-2] == "data: [DONE]"
    assert all(json.loads(line[6:]) for line in lines if line.startswith("data: {"))
    assert answer.headers["content-type"].startswith("text/event-stream")


def test_a_request_of_an_idle_server_is_admitted_and_more_are_not(packaged: dict[str, Model]) -> None:
    settings = {"max_waiting": 0, "engine": {"max_batch_size": 1}}
    body = {"prompt": "It", "max_tokens": 200}
    with serving({"gpt": packaged["novels-gpt"]}, **settings) as running, running.client() as client:
        assert client.post("/v1/completions", json=body | {"n": 2, "max_tokens": 3}).status_code == 200
        with client.stream("POST", "/v1/completions", json=body | {"stream": True, "n": 16}) as answer:
            lines = answer.iter_lines()  # to be kept: the connection is closed with it
            next(lines)
            with running.client() as other:
                refused = other.post("/v1/completions", json=body)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"
