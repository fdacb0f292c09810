"""Masks equal their definitions, written as plain loops over positions."""

from collections.abc import Callable

import pytest
import torch

from clearhead.config import preset
from clearhead.model import Documents, Mask, Pattern
from clearhead.ops.masks import patterns

Rule = Callable[[int, int], bool]
CPU = torch.device("cpu")


def table(rule: Rule, queries: int, keys: int) -> torch.Tensor:
    return torch.tensor([[rule(i, j) for j in range(keys)] for i in range(queries)])


RULES: dict[str, tuple[Pattern, Rule]] = {
    "window": (Pattern("window", 3), lambda i, j: abs(i - j) <= 2),
    "column": (Pattern("column", 4), lambda i, j: (i - j) % 4 == 0),
    "block": (Pattern("block", 4), lambda i, j: i // 4 == j // 4),
    "summary": (Pattern("summary", 4, 2), lambda i, j: j % 4 in (2, 3)),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("causal", [True, False])
def test_each_pattern_equals_its_definition(name: str, causal: bool) -> None:
    pattern, rule = RULES[name]
    dense = Mask(causal, pattern).dense(11, 11, CPU)
    expected = table(lambda i, j: rule(i, j) and (j <= i or not causal), 11, 11)
    assert dense.expand(1, 1, 11, 11)[0, 0].tolist() == expected.tolist()


def test_strided_and_fixed_equal_those_of_sparse_transformers() -> None:
    """Child et al. 2019, section 4.2: two index sets each, here in alternating layers."""
    stride = 4
    config = preset("tiny-gpt", ["decoder_layers=4", "attention=strided", "stride=4"])
    local, column, again, _ = patterns(config, 4)
    assert again == local
    t = 12
    expected = [[j for j in range(t) if max(0, i - stride) <= j <= i] for i in range(t)]
    assert _indices(local, t) == expected
    assert _indices(column, t) == [[j for j in range(i + 1) if (i - j) % stride == 0] for i in range(t)]

    config = preset("tiny-gpt", ["attention=fixed", "stride=4", "summary=1"])
    block, summary = patterns(config, 2)
    assert _indices(block, t) == [[j for j in range(i + 1) if j // stride == i // stride] for i in range(t)]
    assert _indices(summary, t) == [[j for j in range(i + 1) if j % stride == stride - 1] for i in range(t)]


def _indices(pattern: Pattern, tokens: int) -> list[list[int]]:
    dense = Mask(True, pattern).dense(tokens, tokens, CPU).expand(1, 1, tokens, tokens)[0, 0]
    return [row.nonzero().flatten().tolist() for row in dense]


def test_two_steps_of_strided_or_fixed_attention_reach_every_earlier_position() -> None:
    """Directly or through an intermediate position; the residual connection lets a position skip a layer."""
    for lower, upper in (
        (Pattern("column", 4), Pattern("window", 5)),
        (Pattern("block", 4), Pattern("summary", 4, 1)),
    ):
        first, second = (Mask(True, pattern).dense(16, 16, CPU)[0, 0].float() for pattern in (lower, upper))
        reached = second @ first + first > 0
        assert torch.equal(reached, torch.ones(16, 16).tril() > 0)


def test_gpt3_alternates_dense_and_banded_layers() -> None:
    kinds = [pattern.kind for pattern in patterns(preset("gpt3"), 96)]
    assert kinds == ["full", "window"] * 48


def test_strided_alternates_its_patterns_among_other_layers() -> None:
    config = preset("tiny-gpt", ["decoder_layers=6", "attention=[full, strided]", "stride=4"])
    assert [pattern.kind for pattern in patterns(config, 6)] == ["full", "window", "full", "column", "full", "window"]


def test_documents_never_attend_to_each_other() -> None:
    documents = Documents.from_lengths([2, 3])
    dense = Mask(True, documents=(documents, documents)).dense(5, 5, CPU)[0, 0].int().tolist()
    assert dense == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert documents.positions.tolist() == [0, 1, 0, 1, 2]
    assert documents.starts.tolist() == [0, 2, 5]


def test_unpad_inverts_pad() -> None:
    documents, packed = Documents.from_lengths([3, 1, 4]), torch.randn(1, 2, 8, 5)
    rows = documents.pad(packed)
    assert rows.shape == (3, 2, 4, 5)
    assert rows[1, :, 1:].abs().max() == 0
    assert torch.equal(documents.unpad(rows), packed)


def test_an_empty_document_is_refused() -> None:
    for lengths in ([], [3, 0]):
        with pytest.raises(ValueError, match="at least one"):
            Documents.from_lengths(lengths)


def test_lengths_and_starts_apply_to_each_row() -> None:
    padded = Mask(lengths=torch.tensor([1, 3])).dense(2, 3, CPU)
    assert padded[:, 0, 0].tolist() == [[True, False, False], [True, True, True]]
    cached = Mask(causal=True, start=torch.tensor([0, 2])).dense(1, 3, CPU)
    assert cached[:, 0, 0].tolist() == [[True, False, False], [True, True, True]]
