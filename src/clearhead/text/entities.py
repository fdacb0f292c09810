"""Entity spans from BIO tags (O, B-type, I-type)."""

from collections.abc import Iterable, Sequence

from clearhead.errors import UserError


def is_bio_scheme(labels: Iterable[str]) -> bool:
    """Whether all labels are BIO tags: O, B-type or I-type."""
    return all(label == "O" or (label[:2] in ("B-", "I-") and len(label) > 2) for label in labels)


def entities(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return the entities (type, first word, last word) of BIO tags.

    An I- tag without a preceding tag of its type starts an entity, as in the CoNLL script and seqeval's default mode.
    """
    spans: list[tuple[str, int, int]] = []
    previous = "O"
    for index, tag in enumerate(tags):
        if not is_bio_scheme([tag]):
            raise UserError(f"tag {tag!r:.40}: entities need tags O, B-type and I-type; rename it, or use accuracy")
        if tag[0] == "I" and previous[1:] == tag[1:]:
            spans[-1] = (*spans[-1][:2], index)
        elif tag != "O":
            spans.append((tag[2:], index, index))
        previous = tag
    return spans
