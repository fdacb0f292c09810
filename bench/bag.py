"""Bag-of-words baseline against scikit-learn (where installed): accuracy, seconds and speedup.

    python -m bench.bag      AG News (8,000 training rows, the rest for testing) and SST-2 (its train and dev files)

Reads agnews and sst2 from CLEARHEAD_DATA (default ../shared/data).
"""

import argparse
import datetime
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from clearhead.evaluate import accuracy
from clearhead.files import read_lines
from clearhead.text.bag_of_words import BagOfWords, LinearClassifier

ROOT = Path(os.environ.get("CLEARHEAD_DATA", "../shared/data"))
Rows = Sequence[tuple[str, str]]
Classify = Callable[[Rows, Rows], Sequence[str]]


def main() -> None:
    """Train and score both classifiers on both datasets, print the table."""
    argparse.ArgumentParser(
        prog="python -m bench.bag", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    print(datetime.date.today())
    news = rows("agnews/train_10k.tsv.gz")
    datasets = {
        "AG News": (news[:8000], news[8000:]),
        "SST-2": (rows("sst2/train.tsv.gz", header=True), rows("sst2/dev.tsv.gz", header=True)),
    }
    classifiers: dict[str, Classify] = {"clearhead": ours}
    try:
        import sklearn

        classifiers[f"scikit-learn {sklearn.__version__}"] = theirs
    except ImportError:
        print("scikit-learn is not installed: no peer (pip install scikit-learn)")
    print(f"{'dataset':8} {'library':22} {'accuracy':>9} {'rows':>7} {'seconds':>8}")
    for dataset, (train, test) in datasets.items():
        seconds = []
        for name, classify in classifiers.items():
            start = time.perf_counter()
            score = accuracy(classify(train, test), [label for _, label in test])
            seconds.append(time.perf_counter() - start)
            print(f"{dataset:8} {name:22} {score:>9.1%} {len(test):>7,} {seconds[-1]:>8.1f}", flush=True)
        if len(seconds) > 1:
            print(f"{dataset:8} speedup {seconds[1] / seconds[0]:.2f}x")


def rows(name: str, header: bool = False) -> Rows:
    """Return the texts and labels of a TSV file."""
    pairs = [tuple(line.rsplit("\t", 1)) for line in read_lines(ROOT / name)]
    return pairs[header:]  # type: ignore[return-value]


def ours(train: Rows, test: Rows) -> Sequence[str]:
    """Our linear classifier on tf-idf."""
    texts = [text for text, _ in train]
    model = LinearClassifier.fit(texts, [label for _, label in train], BagOfWords.fit(texts))
    return model.predict([text for text, _ in test])


def theirs(train: Rows, test: Rows) -> Sequence[str]:
    """scikit-learn's logistic regression on tf-idf, with our word splitting."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    from clearhead.text.corpus import lowercase_words

    bag = TfidfVectorizer(analyzer=lambda text: list(lowercase_words(text)))
    texts, labels = zip(*train, strict=True)
    model = LogisticRegression(max_iter=1000).fit(bag.fit_transform(texts), labels)
    return list(model.predict(bag.transform([text for text, _ in test])))


if __name__ == "__main__":
    main()
