"""Tables of tensor names, ours to theirs, and how to use one in both directions.

In a table, `*` stands for one part of a dotted name, the same on both sides. Where the other side keeps a tensor in
another layout, or several of ours as one, the entry says so.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from clearhead.checkpoint.tensors import all_names, check_fit, tensors_of
from clearhead.config import ModelConfig
from clearhead.errors import UserError
from clearhead.model import Network, build

SHOWN = 3  # names in an error, before "and 17 more"


class Layout(NamedTuple):
    """How a tensor of theirs is seen as ours, and the other way."""

    ours: Callable[[Tensor], Tensor]
    theirs: Callable[[Tensor], Tensor]


class Entry(NamedTuple):
    """Their name, its layout and, where theirs holds several of ours one after the other, which of them this is."""

    name: str
    layout: Layout
    part: int = 0


SAME = Layout(lambda tensor: tensor, lambda tensor: tensor)
TRANSPOSED = Layout(lambda tensor: tensor.t(), lambda tensor: tensor.t())  # a weight as (in, out); a bias stays
ROW = Layout(lambda tensor: tensor.squeeze(0), lambda tensor: tensor[None])  # (1, n)
Table = dict[str, str | Entry]


def interleaved(heads: int) -> Layout:
    """Rotary pairs side by side instead of half a head apart, in the rows of (heads · E, …)."""

    def ours(tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)

    def theirs(tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)

    return Layout(ours, theirs)


def under(ours: str, theirs: str, table: Table, between: str = ".") -> Table:
    """The table of a part, seen from the whole that calls this part `ours` and `theirs`."""
    return {
        f"{ours}.{name}": entry._replace(name=f"{theirs}{between}{entry.name}")
        for name, entry in ((name, _entry(found)) for name, found in table.items())
    }


def shapes_of(config: ModelConfig, found: Mapping[str, Tensor], where: object) -> Network:
    """The network of a config without its numbers; a config of more layers than there are tensors is not built."""
    if config.encoder_layers + config.decoder_layers > len(found):
        raise UserError(f"{where}: {len(found):,} tensors cannot be a model of so many layers; is the file whole?")
    return build(config, "meta")


def to_ours(table: Table, network: nn.Module, found: Mapping[str, Tensor], where: object) -> dict[str, Tensor]:
    """The tensors of `network` (on the meta device, if you like) out of theirs; none may be missing or left over.

    What we tie may stand there several times, if it is the same each time. `found` may hold gradients, too.
    """
    stored, shapes = all_names(network), {name: tensor.shape for name, tensor in tensors_of(network).items()}
    entries = {name: entry for name in stored if (entry := look_up(name, table)) is not None}
    rows: dict[str, dict[int, int]] = defaultdict(dict)  # how many of theirs each of our parts takes
    for name, entry in entries.items():
        rows[entry.name][entry.part] = shapes[stored[name]][0]
    weights: dict[str, Tensor] = {}
    for name, entry in entries.items():
        if entry.name not in found:
            continue
        part, first = _part(name, entry, found[entry.name], rows[entry.name], where), stored[name]
        if first not in weights:
            weights[first] = part
        elif not torch.equal(weights[first], part):
            raise UserError(f"{where}: {entry.name} differs from what it should be tied to; tie: this model has none")
    if missing := [name for name in shapes if name not in weights]:
        wanted = entries[missing[0]].name if missing[0] in entries else missing[0]
        raise UserError(f"{where}: {wanted} is missing; the file is not whole, or of another kind of model")
    if left := sorted(found.keys() - {entry.name for entry in entries.values()}):
        more = f" and {len(left) - SHOWN} more" if len(left) > SHOWN else ""
        raise UserError(
            f"{where}: {', '.join(left[:SHOWN])}{more}: no part of ours holds this; the model is of another kind"
        )
    check_fit(tensors_of(network), weights, where)
    return weights


def to_theirs(table: Table, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors under their names, in their layout; several of ours that are one there are joined."""
    parts: dict[str, dict[int, Tensor]] = defaultdict(dict)
    layouts: dict[str, Layout] = {}
    for name, tensor in weights.items():
        entry = look_up(name, table)
        if entry is None:
            raise UserError(f"{name}: this format has no place for it")
        parts[entry.name][entry.part] = tensor.detach()
        layouts[entry.name] = entry.layout
    return {
        name: layouts[name].theirs(_cat([tensors[number] for number in sorted(tensors)]))
        for name, tensors in parts.items()
    }


def look_up(name: str, table: Table) -> Entry | None:
    """Their name and layout for a tensor of ours."""
    for pattern, found in table.items():
        if match := re.fullmatch(re.escape(pattern).replace(r"\*", r"([^.]+)"), name):
            entry, parts = _entry(found), iter(match.groups())
            return entry._replace(name=re.sub(r"\*", lambda _: next(parts), entry.name))  # noqa: B023 (used at once)
    return None


def _entry(found: str | Entry) -> Entry:
    return found if isinstance(found, Entry) else Entry(found, SAME)


def _part(name: str, entry: Entry, tensor: Tensor, rows: Mapping[int, int], where: object) -> Tensor:
    """Our share of their tensor."""
    try:
        seen = entry.layout.ours(tensor)
    except (RuntimeError, IndexError):  # a shape that the layout cannot be seen in
        raise UserError(f"{where}: {entry.name} has shape {tuple(tensor.shape)}, which is no {name}") from None
    if len(rows) == 1:
        return seen
    if not seen.dim() or seen.shape[0] != sum(rows.values()):
        raise UserError(f"{where}: {entry.name} is {tuple(tensor.shape)}, but {sum(rows.values())} rows are due")
    start = sum(count for number, count in rows.items() if number < entry.part)
    return seen[start : start + rows[entry.part]]


def _cat(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
