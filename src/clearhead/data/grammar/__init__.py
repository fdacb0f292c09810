"""The embedded corpus: a synchronous grammar that gives sentences in English, German and Chinese, aligned word by word.

nodes.py says what a sentence means, english.py, german.py and chinese.py put it into words, phrases.py, clauses.py and
plans.py draw meanings at random from the tables in lexicon/, split.py holds combinations out, asking.py makes texts
with questions.
"""

from clearhead.data.grammar.entries import LANGUAGES, Language
from clearhead.data.grammar.example import Example, together
from clearhead.data.grammar.grammar import Grammar

__all__ = ["LANGUAGES", "Example", "Grammar", "Language", "together"]
