"""Bags of words as a baseline: accuracy and time of the linear classifier, beside scikit-learn's where it is installed.

    python -m bench.bag      AG News (8,000 rows to learn from, the rest to test) and SST-2 (its train and dev files)

Reads agnews and sst2 from CLEARHEAD_DATA (default ../shared/data).
"""

import datetime
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from clearhead.evaluate import accuracy
from clearhead.files import read_lines
from clearhead.text.bag import BagOfWords, LinearClassifier

ROOT = Path(os.environ.get("CLEARHEAD_DATA", "../shared/data"))
Rows = Sequence[tuple[str, str]]
Classify = Callable[[Rows, Rows], Sequence[str]]


def rows(name: str, header: bool = False) -> Rows:
    """The texts and labels of a TSV file."""
    found = [tuple(line.rsplit("\t", 1)) for line in read_lines(ROOT / name)]
    return found[header:]  # type: ignore[return-value]


def ours(train: Rows, test: Rows) -> Sequence[str]:
    """Our classifier on tf-idf."""
    texts = [text for text, _ in train]
    model = LinearClassifier.fit(texts, [label for _, label in train], BagOfWords.fit(texts))
    return model.predict([text for text, _ in test])


def theirs(train: Rows, test: Rows) -> Sequence[str]:
    """scikit-learn's, with our words."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    from clearhead.text.corpus import words_of

    bag = TfidfVectorizer(analyzer=lambda text: list(words_of(text)))
    texts, labels = zip(*train, strict=True)
    model = LogisticRegression(max_iter=1000).fit(bag.fit_transform(texts), labels)
    return list(model.predict(bag.transform([text for text, _ in test])))


def main() -> None:
    """Run the bench."""
    print(datetime.date.today())
    news = rows("agnews/train_10k.tsv.gz")
    sets = {
        "AG News": (news[:8000], news[8000:]),
        "SST-2": (rows("sst2/train.tsv.gz", header=True), rows("sst2/dev.tsv.gz", header=True)),
    }
    works: dict[str, Classify] = {"ours": ours}
    try:
        import sklearn

        works[f"scikit-learn {sklearn.__version__}"] = theirs
    except ImportError:
        print("scikit-learn is not installed; our figures alone")
    for name, (train, test) in sets.items():
        for who, classify in works.items():
            begun = time.perf_counter()
            right = accuracy(classify(train, test), [label for _, label in test])
            print(f"{name:8} {who:22} {right:.1%} of {len(test):,}   {time.perf_counter() - begun:5.1f} s", flush=True)


if __name__ == "__main__":
    main()
