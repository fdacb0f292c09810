"""Conversations: history in the prompt, oldest turns dropped, broken answers kept, messages in and out."""

from typing import Any

import pytest

from clearhead.errors import UserError
from clearhead.predict import Chat, Model, load
from clearhead.predict.chat import Transcript, Turn
from tests.cli.models import make


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(make(tmp_path_factory.mktemp("chat") / "gpt", "tiny-gpt"), "cpu")


class Fixed:
    """A prompt format like a checkpoint's template."""

    stops = ("e",)

    def prompt(self, system: str, turns: Any) -> str:
        return f"{system}|" + "|".join(f"{user}>{assistant}" for user, assistant in turns)


def test_a_transcript_has_one_line_per_speaker() -> None:
    form, turns = Transcript(), [Turn("hello", "hi"), Turn("how are you?")]
    assert form.prompt("", turns) == "You: hello\nModel: hi\nYou: how are you?\nModel:"
    assert form.prompt("Two talk.", turns[1:]) == "Two talk.\n\nYou: how are you?\nModel:"
    assert form.stops == ("\nYou:", "\nModel:")


def test_an_answer_is_the_generated_text_after_the_transcript(model: Model) -> None:
    chat = Chat(model, seed=3, system="a man", temperature=1.0, max_new_tokens=12)
    prompts = []
    for said in ("hello", "the dog"):
        turns = [*chat.turns, Turn(said)]
        prompts.append(Transcript().prompt("a man", turns))
        dropped, pieces = chat.say(said)
        seed = 3 + len(prompts)
        result = model.generate(prompts[-1], seed=seed, stop=Transcript().stops, temperature=1.0, max_new_tokens=12)
        assert "".join(pieces) == result.text.lstrip()
        assert dropped == 0
        assert chat.turns == [*turns[:-1], Turn(said, result.text.strip())]
    assert prompts[1].startswith(prompts[0])
    chat.reset()
    assert chat.turns == []


def test_a_conversation_continues_from_its_messages(model: Model) -> None:
    first = model.chat(system="a man", max_new_tokens=12)
    answer = first.ask("hello")
    roles = ["system", "user", "assistant"]
    assert [message["role"] for message in first.messages] == roles
    assert [message["content"] for message in first.messages] == ["a man", "hello", answer.strip()]
    second = model.chat(first.messages, max_new_tokens=12)
    assert second.messages == first.messages
    assert second.ask("the dog") == first.ask("the dog")
    for messages, says in (
        ([{"role": "assistant", "content": "hi"}], r"messages.0.role: 'assistant' is out of order"),
        ([{"role": "user", "content": "hi"}], r"messages: the last one is the user's; pass its content to ask\(\)"),
        ([{"role": "user", "text": "hi"}], r"messages.0: not a message; write \{'role'"),
    ):
        with pytest.raises(UserError, match=says):
            model.chat(messages)


def test_the_oldest_turns_are_dropped_and_counted(model: Model) -> None:
    chat, counts = Chat(model, max_new_tokens=20), []
    for number in range(12):
        before = list(chat.turns)
        dropped, pieces = chat.say(f"a man {number}")
        counts.append(dropped)
        if dropped:  # no more than needed
            one_more = Transcript().prompt("", [before[dropped - 1], *chat.turns])
            assert len(model.prompt_ids(one_more)) + 20 > 128
        "".join(pieces)
        assert len(model.prompt_ids(Transcript().prompt("", chat.turns))) + 20 <= 128
        assert chat.turns[-1].user == f"a man {number}"
    assert sum(counts) == 12 - len(chat.turns) > 3
    before = list(chat.turns)
    with pytest.raises(UserError, match=r"for the answer are more than the model's 128 positions"):
        chat.say("x" * 120)
    assert chat.turns == before


def test_a_broken_answer_is_kept_as_far_as_it_came(model: Model) -> None:
    chat = Chat(model, temperature=1.0, seed=1, max_new_tokens=30, prompt_format=Fixed())
    pieces = chat.say("hello")[1]
    first = next(pieces) + next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert chat.turns == [Turn("hello", first.strip())]
    _, pieces = chat.say("the dog")
    answer = "".join(pieces)
    assert "e" not in answer
    assert chat.prompt_format.prompt("", chat.turns) == f"|hello>{first.strip()}|the dog>{answer.strip()}"
