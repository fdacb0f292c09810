"""The embedded corpus: a synchronous grammar for English, German and Chinese sentences with word alignments.

nodes.py defines the meaning representation; english.py, german.py and chinese.py realize it in words; phrases.py,
clauses.py and plans.py sample meanings from the tables in lexicon/; split.py holds out word combinations; asking.py
builds reading comprehension texts with questions.
"""

from clearhead.data.grammar.entries import LANGUAGES, Language
from clearhead.data.grammar.example import Example, together
from clearhead.data.grammar.grammar import Grammar

__all__ = ["LANGUAGES", "Example", "Grammar", "Language", "together"]
