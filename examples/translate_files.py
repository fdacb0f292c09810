"""Translate a file line by line, with three candidates for the sentences the model is least sure of.

python examples/translate_files.py [SOURCE [TARGET]]
"""

import sys
import tempfile
from pathlib import Path

import clearhead

SENTENCES = "Two dogs are playing in the snow.\nWhere is the nearest station?\nShe has lived here for years.\n"


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else folder / "english.txt"
    target = Path(sys.argv[2]) if len(sys.argv) > 2 else folder / "german.txt"
    if len(sys.argv) == 1:
        source.write_text(SENTENCES, encoding="utf-8")

    model = clearhead.load("en-de")
    print(model)
    lines = source.read_text(encoding="utf-8").splitlines()
    results = model.translate(lines, beam=4, n_best=3)
    target.write_text("".join(f"{result}\n" for result in results), encoding="utf-8")
    print(target.read_text(encoding="utf-8"))

    least_sure = min(zip(lines, results, strict=True), key=lambda pair: pair[1].score or 0.0)
    print(f"Least sure: {least_sure[0]}")
    for candidate in least_sure[1].candidates:
        print(f"{candidate.score:8.3f}  {candidate.text}")


if __name__ == "__main__":
    main()
