"""Tables of tensor names, ours to a foreign format's, used in both directions.

In a table, `*` stands for one part of a dotted name, the same on both sides. An `Entry` is for a tensor that the
foreign format stores in another layout, or that is one part of a fused tensor.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from clearhead.checkpoint.tensors import check_fit, named_tensors, stored_names
from clearhead.errors import UserError
from clearhead.ops.linear.quantized_tensor import QuantizedTensor

LM_HEAD = "heads.lm_head.proj.weight"
MAX_SHOWN = 3  # names in an error message, before "and 17 more"


class Layout(NamedTuple):
    """Conversions of a tensor between a foreign layout and ours."""

    from_foreign: Callable[[Tensor], Tensor]
    to_foreign: Callable[[Tensor], Tensor]


class Entry(NamedTuple):
    """The foreign name, its layout and, for a fused tensor, which part of it is ours."""

    name: str
    layout: Layout
    part: int = 0


SAME = Layout(lambda tensor: tensor, lambda tensor: tensor)
TRANSPOSED = Layout(lambda tensor: tensor.t(), lambda tensor: tensor.t())  # weights as (in, out); no-op for biases
ROW = Layout(lambda tensor: tensor.squeeze(0), lambda tensor: tensor[None])  # (1, N)
NameTable = dict[str, str | Entry]


def interleaved(heads: int) -> Layout:
    """Rotary pairs next to each other instead of half a head apart, in the rows of (H · E, …)."""

    def from_foreign(tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)

    def to_foreign(tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)

    return Layout(from_foreign, to_foreign)


def with_prefix(ours: str, theirs: str, table: NameTable, separator: str = ".") -> NameTable:
    """Prefix every name of a submodule's table."""
    return {
        f"{ours}.{name}": entry._replace(name=f"{theirs}{separator}{entry.name}")
        for name, entry in ((name, _entry(value)) for name, value in table.items())
    }


def from_foreign(
    table: NameTable, network: nn.Module, foreign: Mapping[str, Tensor], where: object
) -> dict[str, Tensor]:
    """Convert foreign tensors to those of `network` (which may be on the meta device); all must match.

    Tied tensors may occur several times if they are equal. `foreign` may hold gradients instead of weights.
    """
    stored, shapes = stored_names(network), {name: tensor.shape for name, tensor in named_tensors(network).items()}
    entries = {name: entry for name in stored if (entry := find_entry(name, table)) is not None}
    rows: dict[str, dict[int, int]] = defaultdict(dict)  # rows of each part of a foreign tensor
    for name, entry in entries.items():
        rows[entry.name][entry.part] = shapes[stored[name]][0]
    weights: dict[str, Tensor] = {}
    for name, entry in entries.items():
        if entry.name not in foreign:
            continue
        part, first = _split(name, entry, foreign[entry.name], rows[entry.name], where), stored[name]
        if first not in weights:
            weights[first] = part
        elif not torch.equal(weights[first], part):
            raise UserError(f"{where}: {entry.name} differs from the tensor it is tied to; correct tie_word_embeddings")
    if missing := [name for name in shapes if name not in weights]:
        wanted = entries[missing[0]].name if missing[0] in entries else missing[0]
        if missing == [LM_HEAD]:
            raise UserError(
                f"{where}: {wanted} is missing; if it is the matrix of embeddings, add "
                '"tie_word_embeddings": true to config.json'
            )
        raise UserError(f"{where}: {wanted} is missing; the file is incomplete, or of another architecture")
    if unused := sorted(foreign.keys() - {entry.name for entry in entries.values()}):
        more = f" and {len(unused) - MAX_SHOWN} more" if len(unused) > MAX_SHOWN else ""
        names = ", ".join(unused[:MAX_SHOWN])
        raise UserError(f"{where}: {names}{more}: unexpected tensors; the model is of another architecture")
    whole = {name: entry.name for name, entry in entries.items() if len(rows[entry.name]) == 1}
    foreign_names = {name: whole.get(name, name) for name in shapes}
    expected = {foreign_names[name]: tensor for name, tensor in named_tensors(network).items()}
    check_fit(expected, {foreign_names[name]: tensor for name, tensor in weights.items()}, where)
    return weights


def to_foreign(table: NameTable, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert our tensors to foreign names and layouts, fusing the parts of a fused tensor."""
    parts: dict[str, dict[int, Tensor]] = defaultdict(dict)
    layouts: dict[str, Layout] = {}
    for name, tensor in weights.items():
        entry = find_entry(name, table)
        if entry is None:
            raise UserError(f"{name}: this format does not support it")
        parts[entry.name][entry.part] = tensor.detach()
        layouts[entry.name] = entry.layout
    return {
        name: layouts[name].to_foreign(_cat([tensors[number] for number in sorted(tensors)]))
        for name, tensors in parts.items()
    }


def find_entry(name: str, table: NameTable) -> Entry | None:
    """Return the entry of one of our tensors, its wildcards filled in."""
    for pattern, value in table.items():
        if match := re.fullmatch(re.escape(pattern).replace(r"\*", r"([^.]+)"), name):
            entry, groups = _entry(value), iter(match.groups())
            return entry._replace(name=re.sub(r"\*", lambda _: next(groups), entry.name))  # noqa: B023 (used at once)
    return None


def _entry(value: str | Entry) -> Entry:
    return value if isinstance(value, Entry) else Entry(value, SAME)


def _split(name: str, entry: Entry, tensor: Tensor, rows: Mapping[int, int], where: object) -> Tensor:
    """Convert a foreign tensor to our layout and return our part of it."""
    try:
        converted = _convert(entry.layout, tensor)
    except (RuntimeError, IndexError):  # a shape that the layout does not allow
        raise UserError(f"{where}: {entry.name} has shape {tuple(tensor.shape)}, which does not fit {name}") from None
    if len(rows) == 1:
        return converted
    if not converted.dim() or converted.shape[0] != sum(rows.values()):
        raise UserError(f"{where}: {entry.name} is {tuple(tensor.shape)}, but {sum(rows.values())} rows are expected")
    start = sum(count for number, count in rows.items() if number < entry.part)
    return converted[start : start + rows[entry.part]]


def _convert(layout: Layout, tensor: Tensor) -> Tensor:
    """Convert a tensor to our layout; a quantized one stays so if only its rows move."""
    if not isinstance(tensor, QuantizedTensor) or layout is SAME:
        return layout.from_foreign(tensor)
    rows = layout.from_foreign(torch.arange(len(tensor))[:, None])
    return tensor.rows(rows[:, 0]) if rows.shape == (len(tensor), 1) else layout.from_foreign(tensor.dequantized())


def _cat(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
