"""Classify, tag, answer, fill, embed: alike alone and in batches, at exact positions, in any script."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from clearhead.data.labeled_tasks import window_starts
from clearhead.errors import UserError
from clearhead.predict import Model
from clearhead.predict import answer as answering
from clearhead.predict.encode_batch import InvalidText
from clearhead.predict.fill import masked_rows
from clearhead.text import KINDS, Kind
from clearhead.text.word_split import split_words
from tests.predict.task_models import LABELS, task_model

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
def test_labels_of_a_batch_are_those_of_each_text_alone(family: str) -> None:
    model = task_model("classes", family=family)
    for text, result in zip(TEXTS, model.classify(TEXTS), strict=True):
        hidden = direct(model, text)
        pooled = hidden[:, 0] if family == "tiny-encoder" else hidden[:, -1]
        scores = model.network.heads.classes(pooled).softmax(-1)[0]  # type: ignore[misc]
        assert [label.name for label in result.labels] == [LABELS[n] for n in scores.argsort(descending=True)]
        assert result.scores == pytest.approx(dict(zip(LABELS, scores.tolist(), strict=True)), abs=1e-5)
        assert (result.label, result.score) == (result.labels[0].name, result.labels[0].score)


def test_the_second_text_of_a_pair_has_its_own_segment() -> None:
    model = task_model("classes", text_pairs=True)
    scores = model.network.heads.classes(direct(model, "a cat", "The dog")[:, 0]).softmax(-1)[0]  # type: ignore[misc]
    assert model.classify("a cat", "The dog").scores == pytest.approx(
        dict(zip(LABELS, scores.tolist(), strict=True)), abs=1e-5
    )
    for texts, pairs, message in (("a", None, "reads two texts"), (["a"], [""], "text 1: empty")):
        with pytest.raises(UserError, match=message):
            model.classify(texts, pairs)
    with pytest.raises(UserError, match="reads one text"):
        task_model("classes").classify("a", "b")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_vectors_of_a_batch_are_those_of_each_text_alone(family: str, pooling: str) -> None:
    model = task_model("", family=family, pooling=pooling)
    vectors = model.embed(TEXTS, normalize=False)
    for text, vector in zip(TEXTS, vectors, strict=True):
        hidden = direct(model, text)[0]
        expected = hidden.mean(0) if pooling == "mean" else hidden[0 if family == "tiny-encoder" else -1]
        assert np.abs(vector - expected.numpy()).max() < 1e-5
    assert np.linalg.norm(model.embed(TEXTS), axis=1) == pytest.approx(1, abs=1e-5)
    assert model.embed([]).shape == (0, 16)
    imported = Model(model.network, model.tokenizers, {"pooling": pooling, "max_length": 12})
    assert imported.embed(TEXTS[0]).shape == (16,)
    assert np.array_equal(imported.embed(TEXTS[0]), model.embed(TEXTS[0]))
    with pytest.raises(UserError, match="tokens, but the model reads 10"):
        imported.embed("cat " * 20)
    with pytest.raises(UserError, match="pooling: 'max' is not allowed; use mean or cls"):
        model.embed("a", pooling="max")


def test_results_do_not_depend_on_the_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    model, texts = task_model(""), [" ".join(["cat"] * (1 + n * 7 % 11)) + f" {n}" for n in range(40)]
    single = model.embed(texts)
    monkeypatch.setattr("clearhead.predict.encode_batch.BATCH_TOKENS", {"cpu": 20})
    assert np.abs(model.embed(texts) - single).max() < 1e-5


def test_the_most_similar_texts_come_first() -> None:
    model = task_model("")
    vectors = torch.from_numpy(model.embed(TEXTS))
    scores = F.cosine_similarity(vectors[1:2], vectors)
    matches = model.similar(TEXTS[1], TEXTS, top=3)
    assert [match.index for match in matches] == scores.argsort(descending=True)[:3].tolist()
    assert (matches[0].text, matches[0].score) == (TEXTS[1], pytest.approx(1.0, abs=1e-5))
    assert model.similar([TEXTS[1]], TEXTS, top=3) == [matches]


@pytest.mark.parametrize("kind", KINDS)
def test_masks_are_filled_by_the_most_likely_tokens(kind: Kind) -> None:
    model = task_model("lm", kind)
    text = "The [MASK] sat on<mask>"
    filled, other = model.fill([text, "[MASK] cat"], top=4)
    (first, second), (only,) = filled.masks, other.masks
    assert filled.text == f"The {first.tokens[0].text} sat on{second.tokens[0].text}"
    assert [text[mask.start : mask.end] for mask in (first, second)] == ["[MASK]", "<mask>"]
    mask_id, roles = model.tokenizer.id("mask"), model.tokenizer.roles
    joins = any(token.startswith(("Ġ", "▁")) for token in model.tokenizer.vocabulary)  # the token has its space
    parts = [model.tokenizer.encode(piece) for piece in ("The" if joins else "The ", " sat on")]
    ids = [roles["class"], *parts[0], mask_id, *parts[1], mask_id, roles["separator"]]
    for mask, position in ((first, 1 + len(parts[0])), (second, len(ids) - 2)):
        scores = model.logits(torch.tensor([ids]))[0, position].softmax(-1)
        scores[list(roles.values())] = 0
        assert [token.score for token in mask.tokens] == pytest.approx(scores.topk(4).values.tolist(), abs=1e-5)
    assert len(only.tokens) == 4
    tokens = [token for mask in (first, second, only) for token in mask.tokens]
    assert all(token.text and "[SEP]" not in token.text for token in tokens)


@pytest.mark.parametrize("kind", KINDS)
@given(scripts)
@example("e\u0301tude 猫 🐈x")
@settings(max_examples=30)
def test_tags_have_exact_positions_in_any_script(kind: Kind, text: str) -> None:
    model = task_model("tags", kind)
    try:
        found = model.tag(text, truncate=True)
    except InvalidText:
        assert not model.tokenizer.offsets(" ".join(text[a:b] for a, b in split_words(text)))
        return
    assert found.text == text
    assert all(word.text == text[word.start : word.end] for word in found.words)
    outside, position = "", 0
    for word in found.words:
        assert word.start >= position, "words come in order and none overlaps another"
        outside, position = outside + text[position : word.start], word.end
    assert not (outside + text[position:]).strip(), "only spaces belong to no word"
    for span in found.spans:
        assert span.text == text[span.start : span.end]
        inside = [word for word in found.words if span.start <= word.start and word.end <= span.end]
        assert {word.tag[2:] for word in inside} == {span.label}
        assert span.score == min(word.score for word in inside)


def test_words_given_as_a_list_are_kept() -> None:
    model, given = task_model("tags"), ["New", "York", "isn't", "e\u0301", "猫坐", ",", "x-y"]
    (found,) = model.tag([given])
    assert [word.text for word in found.words] == given
    assert found.text == " ".join(given)
    assert [found.text[word.start : word.end] for word in found.words] == given
    hidden = direct(model, found.text)[0]
    tags = model.network.heads.tags(hidden).softmax(-1)  # type: ignore[misc]
    spans = model.tokenizer.offsets(found.text)
    starts = [word.start for word in found.words]
    for word, start in zip(found.words, starts, strict=True):  # the first token that touches the word
        token = next(n for n, (_, a, b) in enumerate(spans) if b > start)
        score, label = tags[1 + token].detach().max(-1)
        assert (word.tag, word.score) == (LABELS[label], pytest.approx(float(score), abs=1e-5))


def test_words_are_split_as_readers_split_them() -> None:
    cases = {
        "Anna isn't in the U.S. now.": ["Anna", "isn't", "in", "the", "U.S", ".", "now", "."],
        "1996-08-22, 3.14!": ["1996-08-22", ",", "3.14", "!"],
        "狗在 北京": ["狗", "在", "北", "京"],
        "e\u0301te\u0301 क्षि": ["e\u0301te\u0301", "क्षि"],
        " \n ": [],
    }
    for text, expected in cases.items():
        assert [text[a:b] for a, b in split_words(text)] == expected


CONTEXT = "The old cat 🐈 sat on the mät. Zoë's quagmire, née 猫坐在垫子上, sang in the garden behind our house. " * 4


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
@settings(max_examples=30)
def test_an_answer_is_found_anywhere_in_a_long_context(kind: Kind, data: st.DataObject) -> None:
    model = task_model("span", kind, stride=data.draw(st.integers(1, 12)))
    tokens = model.tokenizer.offsets(CONTEXT)
    nonempty = [n for n, (_, a, b) in enumerate(tokens) if CONTEXT[a:b].strip()]
    first = data.draw(st.sampled_from(nonempty))
    last = data.draw(st.sampled_from([n for n in nonempty if first <= n < first + 6]))
    question = model.tokenizer.encode("who sat?")
    room = 48 - len(question) - 3
    stride = min(model.data.stride, room // 2)  # type: ignore[union-attr]
    complete = [first >= start and last < start + room for start in window_starts(len(tokens), room, stride)]

    def oracle(model: Model, rows: list[answering.Row], head_fn: object) -> list[torch.Tensor]:
        """Certain of the answer in every window that has all of it, and of no answer in the others."""
        scores = [torch.zeros(len(row.ids), 2) for row in rows]
        for start, table, row in zip(window_starts(len(tokens), room, stride), scores, rows, strict=True):
            if first >= start and last < start + room:
                table[row.boundary + first - start, 0] = table[row.boundary + last - start, 1] = 20.0
            else:
                table[0] = 20.0
        return scores

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answering, "encode_packed", oracle)
        best = model.answer("who sat?", CONTEXT)
    assert best.text == CONTEXT[best.start : best.end]
    if any(complete):
        start, end = tokens[first][1], tokens[last][2]
        assert best.text == CONTEXT[start:end].strip()
        assert start <= best.start < best.end <= end
        assert best.score > 0.99
    else:
        assert (best.text, best.start, best.end) == ("", 0, 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_answer_scores_are_probabilities_over_all_spans_and_none(family: str) -> None:
    model, context, question = task_model("span", family=family), "The old cat sat on the mat", "who sat?"
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
    found = model.answer(question, context, top=3).candidates
    assert (found[0].text, found[0].score) == (best, pytest.approx(odds[best] / total, rel=1e-3))
    assert all(a.end <= b.start or b.end <= a.start for a in found for b in found if a != b and a.text and b.text)
    assert all(answer.text for answer in model.answer(question, context, top=3, require_answer=True).candidates)


@pytest.mark.parametrize("output", ["lm", "classes", "tags", "span", ""])
def test_empty_and_too_long_texts_are_refused_by_number(output: str) -> None:
    model = task_model(output)
    acts = {
        "lm": model.fill,
        "classes": model.classify,
        "tags": model.tag,
        "span": lambda texts: model.answer(texts, "The cat"),
        "": model.embed,
    }
    good = "a [MASK]" if output == "lm" else "cat"
    for bad in ("", " \n"):
        with pytest.raises(InvalidText, match=r"text 2: .*empty; give some text"):
            acts[output]([good, bad])
    with pytest.raises(InvalidText, match=r"text 2: .*tokens.*shorten it"):
        acts[output]([good, good + " cat" * 25_000])
    if output in ("classes", "tags", ""):
        assert len(acts[output](["cat" * 40_000], truncate=True)) == 1  # type: ignore[operator]
    if output == "span":
        assert model.answer("who?", "The cat sat. " * 8_000).end <= 104_000


def test_a_word_too_long_for_the_tokenizer_is_refused_by_its_characters() -> None:
    model, endless = task_model("classes", "wordpiece"), "x" * 100_000
    assert len(model.tokenizer.encode(endless)) == 1
    with pytest.raises(InvalidText, match=r"text 2: 100,000 characters, but the model reads 46 tokens; shorten it, or"):
        model.classify(["cat", endless])
    assert len(model.classify([endless], truncate=True)) == 1
    with pytest.raises(InvalidText, match=r"text 1: 100,007 characters, but the model reads 46 tokens; shorten it$"):
        task_model("lm", "wordpiece").fill("[MASK] " + endless)
    with pytest.raises(InvalidText, match="text 1: 100,000 characters"):
        task_model("tags", "wordpiece").tag(endless)


def test_words_without_a_token_are_tagged_outside() -> None:
    model, unseen = task_model("tags", "wordpiece"), ["\u200b", "\u200b"]
    assert model.tokenizer.encode(" ".join(unseen)) == []
    first, none, last = model.tag([["The", "cat"], unseen, ["cat", "\u200b"]])
    assert [word.tag for word in none.words] == ["O", "O"]
    assert (none.spans, last.words[1].tag) == ((), "O")
    assert [first] == model.tag([["The", "cat"]])
    with pytest.raises(InvalidText, match="text 2: empty; give some text"):
        model.tag([["cat"], []])


def test_a_model_without_the_head_names_its_own_task() -> None:
    for act in (lambda m: m.classify("a"), lambda m: m.tag("a"), lambda m: m.answer("a", "b")):
        with pytest.raises(UserError, match=r"small was trained for masked-language-model, not for .*; fine-tune it"):
            act(task_model("lm"))
    with pytest.raises(UserError, match="fill: small is a decoder; it can classify and embed"):
        task_model("classes", family="tiny-gpt").fill("a [MASK]")
    with pytest.raises(UserError, match=r"text 1: no mask in it; write .*mask.* where the word is missing"):
        task_model("lm").fill("a cat")


@pytest.mark.parametrize("kind", KINDS)
def test_text_around_a_mask_is_tokenized_as_around_a_word(kind: Kind) -> None:
    model = task_model("lm", kind)
    encode, mask = model.tokenizer.encode, model.tokenizer.id("mask")
    missing = encode("The cat")[len(encode("The ")) if kind == "char" else len(encode("The")) :]
    for text in ("The cat <mask>.", "The <mask>, and the <mask> sat", "The <mask>!", "The <mask> sat <mask> the mat."):
        found = [missing if token == mask else [token] for token in masked_rows(model, [text])[0].ids[1:-1]]
        assert [token for part in found for token in part] == encode(text.replace("<mask>", "cat"))


@pytest.mark.parametrize("output", ["lm", "classes", "tags", "span", ""])
@pytest.mark.parametrize("cleaning", [{}, {"normalize": "nfkc"}])
def test_other_types_and_half_characters_are_refused_by_number(output: str, cleaning: dict[str, str]) -> None:
    model = task_model(output, **({} if output == "span" else cleaning))
    acts = {
        "lm": model.fill,
        "classes": model.classify,
        "tags": model.tag,
        "span": lambda texts: model.answer(texts, "The cat"),
        "": model.embed,
    }
    good = "a [MASK]" if output == "lm" else "cat"
    for bad, message in (
        (None, "NoneType, not a string"),
        (7.5, "float"),
        (b"cat", "bytes"),
        ("[MASK] a\ud800", "U\\+D800"),
    ):
        with pytest.raises(InvalidText, match=rf"^text 2: .*{message}.*; [^\n]*$"):
            acts[output]([good, bad])  # type: ignore[list-item]
    if output == "tags":
        with pytest.raises(InvalidText, match="text 1: a word: int, not a string"):
            model.tag([["a", 7]])  # type: ignore[list-item]


def test_special_tokens_are_never_proposed_for_a_mask() -> None:
    model = task_model("lm")
    roles, vocab = set(model.tokenizer.roles.values()), set(model.tokenizer.vocabulary.values())
    (mask,) = model.fill("a <mask>", top=10_000).masks
    assert len(mask.tokens) == len(vocab - roles)
    assert sum(token.score for token in mask.tokens) <= 1
    assert all(token.score > 0 for token in mask.tokens)


def test_answers_never_overlap_and_a_shared_context_is_tokenized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, context = task_model("span"), "The cat sat on the mat. " * 60
    given: list[int] = []
    offsets_batch = model.tokenizer.offsets_batch
    monkeypatch.setattr(
        model.tokenizer, "offsets_batch", lambda texts: given.append(len(texts)) or offsets_batch(texts)
    )
    found = model.answer(["who sat?", "who?", "where?"], context, top=200)
    assert given == [1]
    for best in found:
        spans = sorted((answer.start, answer.end) for answer in best.candidates if answer.text)
        assert len(spans) > 50
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
