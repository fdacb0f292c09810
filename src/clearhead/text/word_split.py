"""Split text of any script into words, with their character offsets."""

import unicodedata

WORD_JOINERS = "-.'’_@/:"  # part of the word between two letters or digits: U.S, don't, 1996-08-22
# Scripts without spaces: every character is a word of its own, and tags join them.
CJK_RANGES = ((0x3040, 0x30FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x3FFFF))


def split_words(text: str) -> list[tuple[int, int]]:
    """Return the (start, end) offsets of every word and punctuation mark."""
    spans: list[tuple[int, int]] = []
    start = 0
    while start < len(text):
        if text[start].isspace():
            start += 1
            continue
        end = start + 1
        if _is_word_character(text[start]):
            while end < len(text) and (_is_word_character(text[end]) or _is_joiner(text, end)):
                end += 1
        while end < len(text) and unicodedata.category(text[end])[0] == "M":  # combining marks follow their letter
            end += 1
        spans.append((start, end))
        start = end
    return spans


def _is_word_character(character: str) -> bool:
    """Whether a character can be part of a longer word."""
    if any(low <= ord(character) <= high for low, high in CJK_RANGES):
        return False
    return character.isalnum() or unicodedata.category(character)[0] == "M"


def _is_joiner(text: str, index: int) -> bool:
    return (
        text[index] in WORD_JOINERS
        and _is_word_character(text[index - 1])
        and index + 1 < len(text)
        and _is_word_character(text[index + 1])
    )
