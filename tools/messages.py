"""The messages of the command line, and their catalogs; `python -m tools.messages --update` adds the new ones.

A message is every text of the sources that reads like English prose, but for those in SILENT files and calls. F-strings
become templates: their expressions are placeholders, named after them.
"""

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from clearhead.cli.catalog import CONTEXT, parse, read_po, split_margin
from clearhead.cli.localize import help_messages

SOURCE = Path(__file__).parents[1] / "src" / "clearhead"
LOCALE = SOURCE / "cli" / "locale"
# Texts that a user of the command line never sees as messages: the Python API of the core, the reasons of backends
# (INFO), HTML, SVG, model cards, the synthetic corpus, and the words of the library that parses the arguments.
SILENT_FILES = (
    "__init__.py",
    "checkpoint/card.py",
    "data/grammar/",
    "cli/localize.py",
    "evaluate/api.py",
    "inference/native_network.py",
    "interpret/",
    "lab/experiments/",
    "lab/figure",
    "lab/names",
    "lab/report",
    "lab/wording",
    "model/",
    "ops/attention/",
    "ops/native/",
    "ops/triton/",
    "predict/results.py",
    "predict/summary.py",
    "serve/answers.py",
    "serve/app.py",
    "serve/errors.py",
    "serve/explain.py",
    "serve/generation.py",
    "serve/inspect/",
    "serve/batching.py",
    "serve/inputs.py",
    "serve/json_schema.py",
    "serve/languages.py",
    "serve/metrics.py",
    "serve/middleware.py",
    "serve/openapi.py",
    "serve/registry.py",
    "serve/routes/",
    "serve/sampling_options.py",
    "serve/schemas",
    "serve/tokens.py",
    "text/tokenizer_plot.py",
    "train/report",
    "train/run_info.py",
    "train/sweep_report.py",
)
# Functions and constants whose texts are data, recipes or patterns.
SILENT_NAMES = {
    "LANGUAGE_NAMES", "LINES", "NO_ANSWER", "PACKAGES", "PRETOKENIZERS", "SENTENCES", "STORY_PROMPT", "LINKED",
    "next_commands", "_program", "extra_repr", "_format_languages",
    "write_recipe", "_format_info", "_format_score", "_comment", "_longer", "_model_row", "_print_colored", "_title",
}  # fmt: skip
# Calls whose texts are not messages: patterns, names, column titles, texts for developers.
SILENT_CALLS = {
    "add_column", "append_html", "AssertionError", "cast", "compile", "debug", "encode", "findall", "finditer",
    "fullmatch", "getattr", "info", "match", "RuntimeError", "search", "split", "sub", "TypeError", "AttributeError",
    "TypeVar", "filterwarnings",
}  # fmt: skip
WORD = re.compile("[A-Za-z]{2}")
PROSE = re.compile(r"[\w)'\"}] +\w*[A-Za-z]{2}|[A-Za-z]{2}\w*,? +[\w({'\"]|\(\w+: ")  # two words, or a word and a value
DATA = re.compile(r"bold \w+|clearhead( [\w/.-]+)+|# trained elsewhere|\[unused.*|\| .*|.* asked|.*\\p\{.*")
TYPE = re.compile(r'[\w."]+(\[.*\])?( \| [\w."]+(\[.*\])?)*')


def prose(text: str) -> bool:
    """Whether a template reads like prose."""
    return bool(
        has_word(text)
        and PROSE.search("0".join(parse(text)[0]))
        and not TYPE.fullmatch(text)
        and not DATA.fullmatch(text)
    )


def has_word(template: str) -> bool:
    """Whether a template has a word besides its placeholders."""
    return bool(WORD.search(" ".join(parse(template)[0])))


class Messages(ast.NodeVisitor):
    """The messages of one file."""

    def __init__(self) -> None:
        self.found: dict[str, None] = {}

    def add(self, template: str, always: bool = False) -> None:
        """Add the lines of a template that are prose."""
        for line in template.split("\n"):
            before, core, after = split_margin(line)
            fragment = (before or after) and re.search("[ {]", core)
            if prose(core) or ((always or fragment) and has_word(core)):
                self.found[core] = None

    def visit_Expr(self, node: ast.Expr) -> None:
        """Skip docstrings."""
        if not isinstance(node.value, ast.Constant):
            self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Skip functions whose texts are data."""
        if node.name not in SILENT_NAMES:
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        """Skip constants whose texts are data."""
        if not any(getattr(name, "id", "") in SILENT_NAMES for target in node.targets for name in ast.walk(target)):
            self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        """Skip assertions."""

    def visit_Call(self, node: ast.Call) -> None:
        """Visit a call, if its texts may be messages."""
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name in ("warning", "error") and node.args and isinstance(node.args[0], ast.Constant):
            values = iter(node.args[1:])
            self.add(re.sub("%[sd]", lambda _: "{" + name_of(next(values)) + "}", str(node.args[0].value)))
        elif name not in SILENT_CALLS:
            self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        """Take each alternative; if one is prose, a single word in its place is a message, too."""
        sides = [list(_literals(side)) for side in (node.body, node.orelse)]
        templates = [template_of(each) for side in sides for each in side]
        if any(map(prose, templates)):
            for template in templates:
                self.add(template, always=has_word(template))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Take texts that are added up as one, and the alternatives inside as messages of their own."""
        if isinstance(node.op, ast.Add) and any(map(is_text, _summands(node))):
            self.add(template_of(node))
            for each in _summands(node):
                self.visit_placeholders(each) if is_text(each) else self.visit(each)
        else:
            self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Take an f-string, and the texts inside its expressions."""
        self.add(template_of(node))
        self.visit_placeholders(node)

    def visit_placeholders(self, node: ast.expr) -> None:
        """Visit the expressions of an f-string."""
        for value in node.values if isinstance(node, ast.JoinedStr) else ():
            if isinstance(value, ast.FormattedValue):
                self.visit(value.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Take a text without placeholders."""
        if isinstance(node.value, str):
            self.add(template_of(node))


def is_text(node: ast.expr) -> bool:
    """Whether an expression is a text literal or an f-string."""
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _summands(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [*_summands(node.left), *_summands(node.right)]
    return [node]


def _literals(node: ast.expr) -> Iterator[ast.expr]:
    """Yield the texts of an alternative, or of a tuple of them."""
    for each in node.elts if isinstance(node, ast.Tuple) else [node]:
        if is_text(each):
            yield each


def template_of(node: ast.expr) -> str:
    """Return the template of a text, an f-string or a sum of them."""
    parts: list[str] = []
    names: set[str] = set()
    for summand in _summands(node):
        for value in summand.values if isinstance(summand, ast.JoinedStr) else [summand]:
            if is_text(value):
                parts.append(str(value.value).replace("{", "{{").replace("}", "}}"))
                continue
            base = name_of(value.value if isinstance(value, ast.FormattedValue) else value)
            name, number = base, 2
            while name in names:
                name, number = f"{base}{number}", number + 1
            names.add(name)
            parts.append("{" + name + "}")
    return "".join(parts)


def name_of(node: ast.expr) -> str:
    """Return a name for an expression: its variable, attribute, key or function."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.strip("_")
        case ast.Subscript(slice=ast.Constant(value=str(key))):
            return key
        case ast.Subscript(value=value) | ast.Starred(value=value):
            return name_of(value)
        case ast.Call(func=ast.Name(id="len" | "min" | "max" | "sum" | "str" | "repr"), args=[argument, *_]):
            return name_of(argument)
        case ast.Call(func=ast.Attribute(attr="join"), args=[argument, *_]):
            return name_of(argument)
        case ast.Call(func=function):
            return name_of(function)
        case ast.IfExp(body=value) | ast.BinOp(left=value) | ast.GeneratorExp(elt=value) | ast.ListComp(elt=value):
            return name_of(value)
        case ast.BoolOp(values=[value, *_]):
            return name_of(value)
    return "value"


def source_messages() -> dict[str, list[str]]:
    """Return the messages by file; a message of several files belongs to the first."""
    found: dict[str, list[str]] = {}
    seen: set[tuple[str, ...]] = set()
    files = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))
    by_file = {file: _file_messages(file) for file in files if not file.startswith(SILENT_FILES)}
    by_file["typer"] = help_messages()
    for file, texts in by_file.items():
        found[file] = []
        for text in (split_margin(each)[1] for each in texts):
            literals = parse(text)[0]  # other names make no other message
            if literals not in seen:
                found[file].append(text)
            seen.add(literals)
    return {file: texts for file, texts in found.items() if texts}


def _file_messages(file: str) -> list[str]:
    visitor = Messages()
    visitor.visit(ast.parse((SOURCE / file).read_text(encoding="utf-8")))
    return list(visitor.found)


def render(messages: dict[str, list[str]], translations: dict[str, str], language: str) -> str:
    """Render a .po file, one entry a message in the order of the sources."""
    header = [f"Language: {language}", "MIME-Version: 1.0", "Content-Type: text/plain; charset=UTF-8"]
    header.append("Content-Transfer-Encoding: 8bit")
    entries = ["\n".join(['msgid ""', 'msgstr ""', *(_quoted(f"{line}\n") for line in header)])]
    for file, texts in messages.items():
        for text in texts:
            context, _, msgid = text.rpartition(CONTEXT)
            lines = [f"#: {file}"]
            lines += ["#, python-brace-format"] if parse(text)[1] else []
            lines += [f"msgctxt {_quoted(context)}"] if context else []
            lines += [f"msgid {_quoted(msgid)}", f"msgstr {_quoted(translations.get(text, ''))}"]
            entries.append("\n".join(lines))
    return "\n\n".join(entries) + "\n"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def problems(language: str) -> list[str]:
    """Return what is wrong with a catalog: missing, stale and empty messages, and other placeholders."""
    catalog = read_po((LOCALE / f"{language}.po").read_text(encoding="utf-8"))
    known = [text for texts in source_messages().values() for text in texts]
    found = [f"not in the catalog: {text}" for text in known if text not in catalog]
    found += [f"not in the sources: {text}" for text in catalog if text not in set(known)]
    found += [f"not translated: {text}" for text, translation in catalog.items() if not translation]
    for text, translation in catalog.items():
        if translation and sorted(set(parse(text)[1])) != sorted(set(parse(translation)[1])):
            found.append(f"other placeholders: {text} → {translation}")
    return found


def main() -> None:
    """Check the catalogs, or update them from the sources."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--update", action="store_true", help="add new messages untranslated, and remove stale ones")
    update = parser.parse_args().update
    wrong = 0
    for path in sorted(LOCALE.glob("*.po")):
        if update:
            text = render(source_messages(), read_po(path.read_text(encoding="utf-8")), path.stem)
            path.write_text(text, encoding="utf-8")
        for problem in problems(path.stem):
            print(f"{path.name}: {problem}")
            wrong += 1
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
