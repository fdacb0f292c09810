"""Limits of what is read from files: a reader takes at most 20 × the file + 300 MB, and 2 seconds a megabyte.

Each is far above the files that are published for this purpose.
"""

MAX_SETTINGS_BYTES = 1 << 20  # a config, model card or chat template: the longest published have 50 kB
MAX_YAML_CHARS = 1 << 16  # a recipe: ours have 6 kB; PyYAML parses 40 to 150 kB a second
MAX_JSON_BYTES = 1 << 27  # vocabularies, labels, SQuAD: the largest published tokenizer.json has 35 MB
MAX_JSON_GROUPS = 1 << 20  # objects and lists, besides one per 32 bytes of text: `{"":0}` becomes 232 bytes
MAX_JSON_DEPTH = 100  # of nested objects and lists; Python can print 450
MAX_LINE_BYTES = 1 << 20  # a line of text; Les Misérables on one line would be three times as long
MAX_RECORD_BYTES = 1 << 24  # a record of a table or JSON lines, with all its texts
MAX_TEXT_CHARS = 1 << 20  # a text that is tokenized at once: a tokenizer takes 50 to 500 bytes a character
MAX_TOKENS = 1 << 20  # in a vocabulary; the largest published have 256,000
MAX_MERGES, MAX_MERGE_CHARS = 1 << 20, 1 << 25  # tokens that two others form; Gemma has 580,000 of 8 characters
MAX_WORDS, CHARS_PER_WORD = 1 << 22, 64  # different words of a text, besides one per 64 characters: 200 bytes each
CONTEXT_GROWTH, CONTEXT_ALLOWANCE = 8, 1 << 23  # of SQuAD contexts, repeated for each question; SQuAD itself has 2
GZIP_RATIO, GZIP_ALLOWANCE = 200, 1 << 26  # bytes unpacked per byte packed, besides 64 MiB; prose has 3, logs have 20
