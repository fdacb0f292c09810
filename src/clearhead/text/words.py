"""A text of any script cut into words, each with its exact place."""

import unicodedata

JOINS = "-.'’_@/:"  # between two letters or digits they belong to the word: U.S, don't, 1996-08-22
# Scripts written without spaces: every character is a word by itself, and tags join them again.
WHOLE = ((0x3040, 0x30FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x3FFFF))


def words(text: str) -> list[tuple[int, int]]:
    """(first character, character behind the last) of every word and every mark; spaces belong to none."""
    found: list[tuple[int, int]] = []
    place = 0
    while place < len(text):
        if text[place].isspace():
            place += 1
            continue
        behind = place + 1
        if _belongs(text[place]):
            while behind < len(text) and (_belongs(text[behind]) or _joined(text, behind)):
                behind += 1
        while behind < len(text) and unicodedata.category(text[behind])[0] == "M":  # an accent follows its letter
            behind += 1
        found.append((place, behind))
        place = behind
    return found


def _belongs(character: str) -> bool:
    """Whether a character is part of a longer word."""
    if any(low <= ord(character) <= high for low, high in WHOLE):
        return False
    return character.isalnum() or unicodedata.category(character)[0] == "M"


def _joined(text: str, place: int) -> bool:
    return text[place] in JOINS and _belongs(text[place - 1]) and place + 1 < len(text) and _belongs(text[place + 1])
