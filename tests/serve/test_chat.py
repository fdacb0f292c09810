"""`/v1/chat/completions` with the openai and langchain clients."""

import json
from concurrent import futures
from typing import Any

import openai
import pytest
from langchain_openai import ChatOpenAI

from clearhead.predict import Model
from tests.serve.running import Running

MESSAGES = [
    {"role": "system", "content": "Two friends are talking in a garden."},
    {"role": "user", "content": "How are you?"},
    {"role": "assistant", "content": "Very well."},
    {"role": "user", "content": "What did she say?"},
]
SCHEMA = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mood": {"enum": ["good", "bad"]},
    },
    "required": ["age", "mood"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}


@pytest.fixture
def client(running: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0)


def test_served_answer_is_the_local_one(client: openai.OpenAI, packaged: dict[str, Model]) -> None:
    answer = client.chat.completions.create(
        model="novels-gpt", messages=MESSAGES, max_completion_tokens=24, seed=5, temperature=0.8
    )
    chat = packaged["novels-gpt"].chat(
        MESSAGES[1:3], system=MESSAGES[0]["content"], seed=5, max_new_tokens=24, temperature=0.8
    )
    assert answer.choices[0].message.content == chat.ask(MESSAGES[3]["content"])
    assert answer.choices[0].message.role == "assistant"


def test_streamed_answer_is_the_whole_one(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "novels-gpt", "messages": MESSAGES, "max_tokens": 24, "seed": 5, "n": 2}
    whole = client.chat.completions.create(**options)
    texts = ["", ""]
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    for chunk in chunks[:-1]:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant"] * 2
    assert chunks[-1].usage == whole.usage


def test_logprobs_while_streaming(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "novels-gpt", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    options |= {"logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**options).choices[0].logprobs
    assert whole is not None
    assert whole.content is not None
    streamed = [
        token
        for chunk in client.chat.completions.create(**options, stream=True)
        for token in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])
    ]
    assert [token.token for token in streamed] == [token.token for token in whole.content]
    for token in whole.content:
        assert len(token.top_logprobs) == 2
        assert token.top_logprobs[0].logprob == pytest.approx(token.logprob)  # greedy
        assert bytes(token.bytes or []).decode() == token.token


def test_json_matches_its_schema(client: openai.OpenAI) -> None:
    for seed in range(4):
        answer = client.chat.completions.create(
            model="novels-gpt", messages=MESSAGES, response_format=FORMAT, seed=seed, temperature=1.5, n=2
        )
        for choice in answer.choices:
            found = json.loads(choice.message.content or "")
            assert set(found) == {"age", "mood"}
            assert 0 <= found["age"] <= 150
            assert found["mood"] in ("good", "bad")
            assert choice.finish_reason == "stop"


def test_json_beside_plain_texts_changes_neither(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "novels-gpt", "messages": MESSAGES, "max_tokens": 40, "temperature": 1}
    kinds: list[dict[str, Any]] = [{"seed": n // 2} | ({"response_format": FORMAT} if n % 2 else {}) for n in range(12)]

    def ask(kind: dict[str, Any]) -> str | None:
        return client.chat.completions.create(**options, **kind).choices[0].message.content

    alone = [ask(kind) for kind in kinds]
    with futures.ThreadPoolExecutor(12) as pool:
        assert list(pool.map(ask, kinds)) == alone


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "wrong"},
        {"$ref": "https://example.org/schema.json"},
        {"x": "y" * 20_000},
        {"type": []},
        {"enum": ["\ud800"]},
    ],
)
def test_schemas_that_cannot_be_used_are_refused(running: Running, schema: dict[str, Any]) -> None:
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = json.dumps({"messages": MESSAGES, "response_format": wrong})
    with running.client() as client:
        answer = client.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": MESSAGES[:3]}, "messages"),
        ({"messages": MESSAGES[1:] + MESSAGES[:1]}, "messages"),
        ({"messages": [{"role": "user", "content": "a " * 600}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "messages"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"response_format": {"type": "xml"}}, "response_format"),
    ],
)
def test_wrong_requests_are_named(running: Running, change: dict[str, Any], param: str) -> None:
    with running.client() as client:
        answer = client.post("/v1/chat/completions", json={"messages": MESSAGES} | change)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].split(".")[0] == param


def test_langchain_chats_and_streams(running: Running, packaged: dict[str, Model]) -> None:
    options: dict[str, Any] = {"model": "novels-gpt", "base_url": running.url + "/v1", "api_key": "none"}
    llm = ChatOpenAI(**options, temperature=0, max_tokens=16, max_retries=0)
    local = packaged["novels-gpt"].chat(max_new_tokens=16).ask("How are you?")
    assert llm.invoke("How are you?").content == local
    assert "".join(str(chunk.content) for chunk in llm.stream("How are you?")) == local
    llm = ChatOpenAI(**options, temperature=0, max_tokens=100)
    answer = llm.with_structured_output(SCHEMA | {"title": "person"}, method="json_schema").invoke("How are you?")
    assert answer["mood"] in ("good", "bad")
