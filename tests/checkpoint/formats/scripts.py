"""Random lines of text in twenty scripts, with punctuation, digits, mixed lines and runs of spaces."""

import random

RANGES = {
    "Latin": "aàbcdeéfghiïjklmnoöpqrsßtuüvwxyz", "Greek": (0x3B1, 0x3C9), "Cyrillic": (0x430, 0x44F),
    "Armenian": (0x561, 0x586), "Hebrew": (0x5D0, 0x5EA), "Arabic": (0x627, 0x64A), "Devanagari": (0x905, 0x94D),
    "Bengali": (0x995, 0x9A8), "Gurmukhi": (0xA15, 0xA28), "Gujarati": (0xA95, 0xAA8), "Tamil": (0xB95, 0xB9A),
    "Telugu": (0xC15, 0xC28), "Kannada": (0xC95, 0xCA8), "Malayalam": (0xD15, 0xD28), "Thai": (0xE01, 0xE2E),
    "Georgian": (0x10D0, 0x10F0), "Ethiopic": (0x1208, 0x1246), "Khmer": (0x1780, 0x17A2), "Hangul": (0xAC00, 0xAC50),
    "Hiragana": (0x3041, 0x3093), "Han": (0x4E00, 0x4E80),
}  # fmt: skip
SPACELESS = ("Thai", "Khmer", "Hiragana", "Han")


def letters(script: str) -> str:
    """Return the letters of a script."""
    span = RANGES[script]
    return span if isinstance(span, str) else "".join(map(chr, range(span[0], span[1] + 1)))


def lines(count: int, seed: int = 0) -> list[str]:
    """Return lines, the scripts taking turns; words come from a small lexicon of each, which can be learned."""
    rng = random.Random(seed)
    lexicons = {
        script: ["".join(random.Random(f"{script}{n}").choices(letters(script), k=1 + n % 7)) for n in range(60)]
        for script in RANGES
    }
    return [_line(rng, [*RANGES][number % len(RANGES)], lexicons) for number in range(count)]


def _line(rng: random.Random, script: str, lexicons: dict[str, list[str]]) -> str:
    words = rng.choices(lexicons[script], k=rng.randint(1, 12))
    if rng.random() < 0.2:
        words.append(rng.choice(lexicons[rng.choice([*RANGES])]))
    if rng.random() < 0.3:
        words.insert(rng.randrange(len(words)), str(rng.randrange(10_000)))
    if script == "Latin":
        words = [word.capitalize() if rng.random() < 0.2 else word for word in words]
    space = "" if script in SPACELESS else " " if rng.random() < 0.9 else "  "
    text = space.join(words) + rng.choice([".", "?", "!", "…", "", " ", "。"])
    return " " + text if rng.random() < 0.05 else text
