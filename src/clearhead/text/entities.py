"""Spans of words from their tags: O, B-type, I-type."""

from collections.abc import Iterable, Sequence

from clearhead.errors import UserError


def is_entity_scheme(labels: Iterable[str]) -> bool:
    """Whether tags are those of entities: O, or B- and I- with a type."""
    return all(label == "O" or (label[:2] in ("B-", "I-") and len(label) > 2) for label in labels)


def entities(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """The entities (type, first, last) of one text's tags: O, B-type to begin one, I-type to go on.

    An I- that has nothing of its type to go on begins an entity, as in the CoNLL script and in seqeval's usual mode.
    """
    found: list[tuple[str, int, int]] = []
    before = "O"
    for place, tag in enumerate(tags):
        if not is_entity_scheme([tag]):
            raise UserError(f"tag {tag!r:.40}: entities need tags O, B-type and I-type; rename it, or use accuracy")
        if tag[0] == "I" and before[1:] == tag[1:]:
            found[-1] = (*found[-1][:2], place)
        elif tag != "O":
            found.append((tag[2:], place, place))
        before = tag
    return found
