"""A conversation as the checkpoint's own chat template writes it, to the ids that the model was taught with."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from clearhead.errors import UserError
from clearhead.predict import rendering
from clearhead.text import Tokenizer

SECONDS = 2.0  # that a template may take
LARGEST = 1 << 18  # characters of a template
MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # characters that no text has


class Turn(NamedTuple):
    """What was said, and what was answered so far."""

    said: str
    answer: str = ""


class Template:
    """The form of a model with a chat template; a special token is one where the template wrote it, not the user."""

    stops: tuple[str, ...] = ()  # the model ends its answers itself

    def __init__(self, source: str, tokenizer: Tokenizer, begin: Sequence[int] = (), ends: Sequence[int] = ()):
        if len(source) > LARGEST:
            raise UserError(f"chat template: {len(source)} characters, but {LARGEST} are read")
        self.tokenizer, self.begin, self.source = tokenizer, list(begin), source
        self.renderer = Renderer()
        special = [token.content for token in tokenizer.engine.get_added_tokens_decoder().values() if token.special]
        longest_first = sorted(filter(None, special), key=len, reverse=True)
        self.specials = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        first = [*begin, *([tokenizer.roles["begin"]] if "begin" in tokenizer.roles else [])]
        self.names = {
            "bos_token": tokenizer.token(first[0]) if first else "",
            "eos_token": tokenizer.token(ends[0]) if ends else "",
        }

    def prompt(self, system: str, turns: Sequence[Turn]) -> list[int]:
        """The ids that the answer to the last turn follows."""
        said = [(role, text) for turn in turns for role, text in (("user", turn.said), ("assistant", turn.answer))]
        return self.ids([*([("system", system)] if system else []), *said[:-1]])

    def ids(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """The ids of (role, text) messages, up to where the assistant begins."""
        mark = _unused([text for _, text in messages])
        # What looks like a special token inside a message is broken up, which a template's own logic never sees.
        texts = [self.specials.sub(lambda found: found[0][:1] + mark + found[0][1:], text) for _, text in messages]
        written = [{"role": role, "content": text} for (role, _), text in zip(messages, texts, strict=True)]
        rendered = self.renderer.render(self.source, {"messages": written, "add_generation_prompt": True, **self.names})
        names = self.specials.findall(rendered)
        between = [text.replace(mark, "") for text in self.specials.split(rendered)]
        pieces = self.tokenizer.encode_batch(between)
        found = list(pieces[0])
        for name, piece in zip(names, pieces[1:], strict=True):
            found += [self.tokenizer.vocabulary[name], *piece]
        return found if found[: len(self.begin)] == self.begin else [*self.begin, *found]


def _unused(texts: Sequence[str]) -> str:
    """A mark that stands in none of the texts."""
    found = next((mark for mark in MARKS if not any(mark in text for text in texts)), None)
    if found is None:
        raise UserError("the text has every character of U+FDD0 to U+FDEF, which are no characters; leave one out")
    return found


class Renderer:
    """Renders templates in a process of its own, begun when first needed, ended when it takes too long."""

    def __init__(self, seconds: float = SECONDS):
        self.seconds = seconds
        self._process: subprocess.Popen[str] | None = None

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """The text of a template with these variables; what it may not do is a UserError."""
        answer = json.loads(self._ask(json.dumps({"template": template, "variables": variables})) or "{}")
        if "text" in answer:
            return str(answer["text"])
        if "refused" in answer:
            raise UserError(f"the model's chat template refuses this conversation: {answer['refused']}")
        reason = answer.get("error", f"it takes more than {self.seconds:g} seconds, or too much memory")
        raise UserError(f"the model's chat template cannot be used ({reason}); take a model whose template works")

    def _ask(self, line: str) -> str:
        """One line there and one back; nothing, if the process ended."""
        if self._process is None or self._process.poll() is not None:
            self._process = _start()
            self._ready(self._process)
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        clock = threading.Timer(self.seconds, process.kill)
        clock.start()
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except OSError:  # it ended while we wrote
            answer = ""
        finally:
            clock.cancel()
        if not answer:
            self.close()
        return answer

    def _ready(self, process: subprocess.Popen[str]) -> None:
        """Wait until it has started, which is not the template's time."""
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise UserError("chat templates need jinja2, which cannot be started; pip install 'jinja2>=3.1.6'")

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was written and never read
                    pipe.close()
        process.wait()

    def __del__(self) -> None:
        self.close()


def _start() -> subprocess.Popen[str]:
    command = [sys.executable, "-I", str(Path(rendering.__file__))]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, encoding="utf-8")
