"""A conversation: what was said is seen, what no longer fits is forgotten and told, a broken answer is kept."""

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
    """A form of its own, as a checkpoint's template will be."""

    stops = ("e",)

    def prompt(self, system: str, turns: Any) -> str:
        return f"{system}|" + "|".join(f"{said}>{answer}" for said, answer in turns)


def test_a_transcript_is_a_line_for_each_that_speaks() -> None:
    form, turns = Transcript(), [Turn("hello", "hi"), Turn("how are you?")]
    assert form.prompt("", turns) == "You: hello\nModel: hi\nYou: how are you?\nModel:"
    assert form.prompt("Two talk.", turns[1:]) == "Two talk.\n\nYou: how are you?\nModel:"
    assert form.stops == ("\nYou:", "\nModel:")


def test_an_answer_is_what_the_model_writes_behind_the_transcript(model: Model) -> None:
    talk = Chat(model, seed=3, system="a man", temperature=1.0, max_new_tokens=12)
    prompts = []
    for said in ("hello", "the dog"):
        turns = [*talk.turns, Turn(said)]
        prompts.append(Transcript().prompt("a man", turns))
        forgotten, pieces = talk.say(said)
        seed = 3 + len(prompts)
        [[text]] = model.generate(prompts[-1], seed=seed, stop=Transcript().stops, temperature=1.0, max_new_tokens=12)
        assert "".join(pieces) == text.text.lstrip()
        assert forgotten == 0
        assert talk.turns == [*turns[:-1], Turn(said, text.text.strip())]
    assert prompts[1].startswith(prompts[0])
    talk.reset()
    assert talk.turns == []


def test_the_oldest_turns_make_room_and_it_is_told(model: Model) -> None:
    talk, told = Chat(model, max_new_tokens=20), []
    for number in range(12):
        before = list(talk.turns)
        forgotten, pieces = talk.say(f"a man {number}")
        told.append(forgotten)
        if forgotten:  # no more than needed
            one_more = Transcript().prompt("", [before[forgotten - 1], *talk.turns])
            assert len(model.prompt_ids(one_more)) + 20 > 128
        "".join(pieces)
        assert len(model.prompt_ids(Transcript().prompt("", talk.turns))) + 20 <= 128
        assert talk.turns[-1].said == f"a man {number}"
    assert sum(told) == 12 - len(talk.turns) > 3
    before = list(talk.turns)
    with pytest.raises(UserError, match=r"for the answer are more than the model's 128 positions"):
        talk.say("x" * 120)
    assert talk.turns == before


def test_a_broken_answer_is_kept_as_far_as_it_came(model: Model) -> None:
    talk = Chat(model, temperature=1.0, seed=1, max_new_tokens=30, form=Fixed())
    pieces = talk.say("hello")[1]
    first = next(pieces) + next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert talk.turns == [Turn("hello", first.strip())]
    _, pieces = talk.say("the dog")
    answer = "".join(pieces)
    assert "e" not in answer
    assert talk.form.prompt("", talk.turns) == f"|hello>{first.strip()}|the dog>{answer.strip()}"
