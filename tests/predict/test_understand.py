"""What models that read say about texts: the same alone and among others, at exact places, in any script."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from clearhead.data.labeled_tasks import windows
from clearhead.errors import UserError
from clearhead.predict import Model
from clearhead.predict import answer as answering
from clearhead.predict.encode_batch import InvalidText
from clearhead.predict.fill import _rows
from clearhead.text import KINDS, Kind
from clearhead.text.word_split import words
from tests.predict.readers import LABELS, reader

TEXTS = [
    "The cat sat.",
    "a",
    "猫坐在垫子上。狗坐在猫上。",
    "The dog sat on the old cat 🐈 in the house",
    "Ärger über Öl!",
]
FAMILIES = ("tiny-encoder", "tiny-gpt")
pieces = st.sampled_from(
    [
        "cat",
        " ",
        "  ",
        "\n",
        "é",
        "e\u0301",
        "ß",
        "猫",
        "坐",
        "🐈",
        "👩‍👩‍👧",
        "क्षि",
        "السلام",
        "-",
        ".",
        "U.S.",
        "'s",
        "\u200d",
    ]
)
scripts = st.lists(pieces, min_size=1, max_size=12).map("".join)


def direct(model: Model, text: str, second: str | None = None) -> torch.Tensor:
    """The hidden states of one text by itself, unpacked: (1, T, D)."""
    roles = model.tokenizer.roles
    ids = [roles["class"], *model.tokenizer.encode(text), roles["separator"]]
    segments = [0] * len(ids)
    if second is not None:
        more = [*model.tokenizer.encode(second), roles["separator"]]
        ids, segments = ids + more, segments + [1] * len(more)
    with torch.no_grad():
        if model.config.family == "decoder":
            return model.network.decode(torch.tensor([ids]))  # type: ignore[operator]
        return model.network.encode(torch.tensor([ids]), segments=torch.tensor([segments]))  # type: ignore[operator]


@pytest.mark.parametrize("family", FAMILIES)
def test_labels_are_those_of_each_text_by_itself(family: str) -> None:
    model = reader("classes", family=family)
    for text, found in zip(TEXTS, model.classify(TEXTS), strict=True):
        hidden = direct(model, text)
        pooled = hidden[:, 0] if family == "tiny-encoder" else hidden[:, -1]
        scores = model.network.heads.classes(pooled).softmax(-1)[0]  # type: ignore[misc]
        assert [label.name for label in found] == [LABELS[n] for n in scores.argsort(descending=True)]
        assert {label.name: label.score for label in found} == pytest.approx(
            dict(zip(LABELS, scores.tolist(), strict=True)), abs=1e-5
        )


def test_the_second_text_of_a_pair_has_its_own_segment() -> None:
    model = reader("classes", text_pairs=True)
    scores = model.network.heads.classes(direct(model, "a cat", "The dog")[:, 0]).softmax(-1)[0]  # type: ignore[misc]
    found = {label.name: label.score for label in model.classify("a cat", "The dog")[0]}
    assert found == pytest.approx(dict(zip(LABELS, scores.tolist(), strict=True)), abs=1e-5)
    for texts, seconds, says in (("a", None, "reads two texts"), (["a"], [""], "text 1: empty")):
        with pytest.raises(UserError, match=says):
            model.classify(texts, seconds)
    with pytest.raises(UserError, match="reads one text"):
        reader("classes").classify("a", "b")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pooling", ["mean", "class"])
def test_vectors_are_those_of_each_text_by_itself(family: str, pooling: str) -> None:
    model = reader("", family=family, pooling=pooling)
    found = model.embed(TEXTS, normalize=False)
    for text, vector in zip(TEXTS, found, strict=True):
        hidden = direct(model, text)[0]
        wanted = hidden.mean(0) if pooling == "mean" else hidden[0 if family == "tiny-encoder" else -1]
        assert np.abs(vector - wanted.numpy()).max() < 1e-5
    assert np.linalg.norm(model.embed(TEXTS), axis=1) == pytest.approx(1, abs=1e-5)
    assert model.embed([]).shape == (0, 16)
    imported = Model(model.network, model.tokenizers, {"pooling": pooling, "max_length": 12})  # says no more than this
    assert np.array_equal(imported.embed(TEXTS[0]), model.embed(TEXTS[0]))
    with pytest.raises(UserError, match="tokens, but the model reads 10"):
        imported.embed("cat " * 20)
    with pytest.raises(UserError, match="pooling: 'max' is not allowed; use mean or class"):
        model.embed("a", pooling="max")


def test_many_batches_give_what_one_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    model, texts = reader(""), [" ".join(["cat"] * (1 + n * 7 % 11)) + f" {n}" for n in range(40)]
    whole = model.embed(texts)
    monkeypatch.setattr("clearhead.predict.encode_batch.TOKENS", {"cpu": 20})
    assert np.abs(model.embed(texts) - whole).max() < 1e-5


def test_the_most_similar_texts_come_first() -> None:
    model = reader("")
    vectors = torch.from_numpy(model.embed(TEXTS))
    scores = F.cosine_similarity(vectors[1:2], vectors)
    found = model.similar(TEXTS[1], TEXTS, top=3)[0]
    assert [match.position for match in found] == scores.argsort(descending=True)[:3].tolist()
    assert found[0] == (1, pytest.approx(1.0, abs=1e-5))


@pytest.mark.parametrize("kind", KINDS)
def test_masks_are_filled_by_the_words_with_the_highest_scores(kind: Kind) -> None:
    model = reader("words", kind)
    text = "The [MASK] sat on<mask>"
    (first, second), (only,) = model.fill([text, "[MASK] cat"], top=4)
    assert [text[gap.start : gap.end] for gap in (first, second)] == ["[MASK]", "<mask>"]
    mask, roles = model.tokenizer.id("mask"), model.tokenizer.roles
    joins = any(token.startswith(("Ġ", "▁")) for token in model.tokenizer.vocabulary)  # the word brings its space
    parts = [model.tokenizer.encode(piece) for piece in ("The" if joins else "The ", " sat on")]
    ids = [roles["class"], *parts[0], mask, *parts[1], mask, roles["separator"]]
    for gap, place in ((first, 1 + len(parts[0])), (second, len(ids) - 2)):
        scores = model.logits(torch.tensor([ids]))[0, place].softmax(-1)
        scores[list(roles.values())] = 0
        assert [word.score for word in gap.words] == pytest.approx(scores.topk(4).values.tolist(), abs=1e-5)
    assert len(only.words) == 4
    assert all(word.text and "[SEP]" not in word.text for gap in (first, second, only) for word in gap.words)


@pytest.mark.parametrize("kind", KINDS)
@given(scripts)
@example("e\u0301tude 猫 🐈x")
@settings(max_examples=30)
def test_tags_stand_at_exact_places_in_any_script(kind: Kind, text: str) -> None:
    model = reader("tags", kind)
    try:
        (found,) = model.tag(text, truncate=True)
    except InvalidText:
        assert not model.tokenizer.offsets(" ".join(text[a:b] for a, b in words(text)))
        return
    assert found.text == text
    assert all(word.text == text[word.start : word.end] for word in found.words)
    outside, place = "", 0
    for word in found.words:
        assert word.start >= place, "words come in order and none overlaps another"
        outside, place = outside + text[place : word.start], word.end
    assert not (outside + text[place:]).strip(), "only spaces belong to no word"
    for span in found.spans:
        assert span.text == text[span.start : span.end]
        inside = [word for word in found.words if span.start <= word.start and word.end <= span.end]
        assert {word.tag[2:] for word in inside} == {span.label}
        assert span.score == min(word.score for word in inside)


def test_words_of_the_user_are_kept() -> None:
    model, given = reader("tags"), ["New", "York", "isn't", "e\u0301", "猫坐", ",", "x-y"]
    (found,) = model.tag([given])
    assert [word.text for word in found.words] == given
    assert found.text == " ".join(given)
    assert [found.text[word.start : word.end] for word in found.words] == given
    hidden = direct(model, found.text)[0]
    tags = model.network.heads.tags(hidden).softmax(-1)  # type: ignore[misc]
    spans = model.tokenizer.offsets(found.text)
    starts = [word.start for word in found.words]
    for word, start in zip(found.words, starts, strict=True):  # the first token that touches the word tells its tag
        token = next(n for n, (_, a, b) in enumerate(spans) if b > start)
        score, label = tags[1 + token].detach().max(-1)
        assert (word.tag, word.score) == (LABELS[label], pytest.approx(float(score), abs=1e-5))


def test_words_are_parted_as_people_part_them() -> None:
    cases = {
        "Anna isn't in the U.S. now.": ["Anna", "isn't", "in", "the", "U.S", ".", "now", "."],
        "1996-08-22, 3.14!": ["1996-08-22", ",", "3.14", "!"],
        "狗在 北京": ["狗", "在", "北", "京"],
        "e\u0301te\u0301 क्षि": ["e\u0301te\u0301", "क्षि"],
        " \n ": [],
    }
    for text, wanted in cases.items():
        assert [text[a:b] for a, b in words(text)] == wanted


CONTEXT = "The old cat 🐈 sat on the mät. Zoë's quagmire, née 猫坐在垫子上, sang in the garden behind our house. " * 4


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
@settings(max_examples=30)
def test_an_answer_is_found_wherever_it_stands_in_a_long_context(kind: Kind, data: st.DataObject) -> None:
    model = reader("span", kind, stride=data.draw(st.integers(1, 12)))
    tokens = model.tokenizer.offsets(CONTEXT)
    real = [n for n, (_, a, b) in enumerate(tokens) if CONTEXT[a:b].strip()]
    first = data.draw(st.sampled_from(real))
    last = data.draw(st.sampled_from([n for n in real if first <= n < first + 6]))
    question = model.tokenizer.encode("who sat?")
    room = 48 - len(question) - 3
    stride = min(model.data.stride, room // 2)  # type: ignore[union-attr]
    whole = [first >= start and last < start + room for start in windows(len(tokens), room, stride)]

    def oracle(model: Model, rows: list[answering.Row], each: object) -> list[torch.Tensor]:
        """Sure of the answer in every window that has all of it, and of none in the others."""
        scores = [torch.zeros(len(row.ids), 2) for row in rows]
        for start, table, row in zip(windows(len(tokens), room, stride), scores, rows, strict=True):
            if first >= start and last < start + room:
                table[row.boundary + first - start, 0] = table[row.boundary + last - start, 1] = 20.0
            else:
                table[0] = 20.0
        return scores

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answering, "read", oracle)
        ((best,),) = model.answer("who sat?", CONTEXT)
    assert best.text == CONTEXT[best.start : best.end]
    if any(whole):
        begin, behind = tokens[first][1], tokens[last][2]
        assert best.text == CONTEXT[begin:behind].strip()
        assert begin <= best.start < best.end <= behind
        assert best.score > 0.99
    else:
        assert best[:3] == ("", 0, 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_the_shares_of_all_spans_and_none(family: str) -> None:
    model, context, question = reader("span", family=family), "The old cat sat on the mat", "who sat?"
    scores = model.network.heads.span(direct(model, question, context)[0]).detach()  # type: ignore[misc]
    spans = model.tokenizer.offsets(context)
    begin = len(model.tokenizer.encode(question)) + 2
    odds = {
        context[spans[a][1] : spans[b][2]].strip(): float((scores[begin + a, 0] + scores[begin + b, 1]).exp())
        for a in range(len(spans))
        for b in range(a, len(spans))
    }
    odds[""] = float(scores[0].sum().exp())
    total, best = sum(odds.values()), max(odds, key=lambda text: odds[text])
    (found,) = model.answer(question, context, top=3)
    assert (found[0].text, found[0].score) == (best, pytest.approx(odds[best] / total, rel=1e-3))
    assert all(a.end <= b.start or b.end <= a.start for a in found for b in found if a != b and a.text and b.text)
    assert all(answer.text for answer in model.answer(question, context, top=3, require_answer=True)[0])


@pytest.mark.parametrize("output", ["words", "classes", "tags", "span", ""])
def test_empty_and_endless_texts_are_refused_by_number(output: str) -> None:
    model = reader(output)
    acts = {
        "words": model.fill,
        "classes": model.classify,
        "tags": model.tag,
        "span": lambda texts: model.answer(texts, "The cat"),
        "": model.embed,
    }
    good = "a [MASK]" if output == "words" else "cat"
    for bad in ("", " \n"):
        with pytest.raises(InvalidText, match=r"text 2: .*empty; give some text"):
            acts[output]([good, bad])
    with pytest.raises(InvalidText, match=r"text 2: .*tokens.*shorten it"):
        acts[output]([good, good + " cat" * 25_000])
    if output in ("classes", "tags", ""):
        assert len(acts[output](["cat" * 40_000], cut=True)) == 1  # type: ignore[call-arg]
    if output == "span":
        assert model.answer("who?", "The cat sat. " * 8_000)[0][0].end <= 104_000


def test_a_word_too_long_for_the_tokenizer_is_no_short_text() -> None:
    model, endless = reader("classes", "wordpiece"), "x" * 100_000
    assert len(model.tokenizer.encode(endless)) == 1
    with pytest.raises(InvalidText, match=r"text 2: 100,000 characters, but the model reads 46 tokens; shorten it, or"):
        model.classify(["cat", endless])
    assert len(model.classify([endless], truncate=True)) == 1
    with pytest.raises(InvalidText, match=r"text 1: 100,007 characters, but the model reads 46 tokens; shorten it$"):
        reader("words", "wordpiece").fill("[MASK] " + endless)
    with pytest.raises(InvalidText, match="text 1: 100,000 characters"):
        reader("tags", "wordpiece").tag(endless)


def test_words_that_have_no_token_are_outside_of_everything() -> None:
    model, unseen = reader("tags", "wordpiece"), ["\u200b", "\u200b"]
    assert model.tokenizer.encode(" ".join(unseen)) == []
    first, none, last = model.tag([["The", "cat"], unseen, ["cat", "\u200b"]])
    assert [word.tag for word in none.words] == ["O", "O"]
    assert (none.spans, last.words[1].tag) == ([], "O")
    assert [first] == model.tag([["The", "cat"]])
    with pytest.raises(InvalidText, match="text 2: empty; give some text"):
        model.tag([["cat"], []])


def test_a_model_without_the_head_says_what_it_is_for() -> None:
    for act in (lambda m: m.classify("a"), lambda m: m.tag("a"), lambda m: m.answer("a", "b")):
        with pytest.raises(UserError, match=r"small was made for masked-language-model, not for .*; fine-tune it"):
            act(reader("words"))
    with pytest.raises(UserError, match="fill: small is a decoder; it can classify and embed"):
        reader("classes", family="tiny-gpt").fill("a [MASK]")
    with pytest.raises(UserError, match=r"text 1: no mask in it; write .*mask.* where the word is missing"):
        reader("words").fill("a cat")


@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_around_a_mask_is_read_as_if_a_word_stood_there(kind: Kind) -> None:
    model = reader("words", kind)
    encode, mask = model.tokenizer.encode, model.tokenizer.id("mask")
    missing = encode("The cat")[len(encode("The ")) if kind == "char" else len(encode("The")) :]
    for text in ("The cat <mask>.", "The <mask>, and the <mask> sat", "The <mask>!", "The <mask> sat <mask> the mat."):
        found = [missing if token == mask else [token] for token in _rows(model, [text], mask)[0].ids[1:-1]]
        assert [token for part in found for token in part] == encode(text.replace("<mask>", "cat"))


@pytest.mark.parametrize("output", ["words", "classes", "tags", "span", ""])
@pytest.mark.parametrize("cleaning", [{}, {"normalize": "nfkc"}])
def test_what_is_no_text_is_refused_by_number(output: str, cleaning: dict[str, str]) -> None:
    model = reader(output, **({} if output == "span" else cleaning))
    acts = {
        "words": model.fill,
        "classes": model.classify,
        "tags": model.tag,
        "span": lambda texts: model.answer(texts, "The cat"),
        "": model.embed,
    }
    good = "a [MASK]" if output == "words" else "cat"
    for bad, says in (
        (None, "NoneType, not a string"),
        (7.5, "float"),
        (b"cat", "bytes"),
        ("[MASK] a\ud800", "U\\+D800"),
    ):
        with pytest.raises(InvalidText, match=rf"^text 2: .*{says}.*; [^\n]*$"):
            acts[output]([good, bad])  # type: ignore[list-item]
    if output == "tags":
        with pytest.raises(InvalidText, match="text 1: a word: int, not a string"):
            model.tag([["a", 7]])  # type: ignore[list-item]


def test_only_words_are_proposed_for_a_mask() -> None:
    model = reader("words")
    roles, known = set(model.tokenizer.roles.values()), set(model.tokenizer.vocabulary.values())
    (gap,) = model.fill("a <mask>", top=10_000)[0]
    assert len(gap.words) == len(known - roles)
    assert sum(word.score for word in gap.words) <= 1
    assert all(word.score > 0 for word in gap.words)


def test_many_answers_never_overlap_and_a_shared_context_is_tokenized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, context = reader("span"), "The cat sat on the mat. " * 60
    given: list[int] = []
    offsets_batch = model.tokenizer.offsets_batch
    monkeypatch.setattr(
        model.tokenizer, "offsets_batch", lambda texts: given.append(len(texts)) or offsets_batch(texts)
    )
    found = model.answer(["who sat?", "who?", "where?"], context, top=200)
    assert given == [1]
    for answers in found:
        places = sorted((answer.start, answer.end) for answer in answers if answer.text)
        assert len(places) > 50
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(places))
