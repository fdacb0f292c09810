"""Chat templates of checkpoints: a conversation to the ids that the model was trained with."""

from __future__ import annotations

import contextlib
import json
import os
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

RENDER_SECONDS = 2.0  # time limit of one rendering
MAX_TEMPLATE_CHARS = 1 << 18
PYTHON_NEEDS = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")  # environment variables, to start at all
NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # never part of a text


class Turn(NamedTuple):
    """A message of the user, and the assistant's answer so far."""

    user: str
    assistant: str = ""


class Template:
    """A chat template; special tokens count where the template writes them, never inside a message."""

    stops: tuple[str, ...] = ()  # the model ends its answers itself

    def __init__(self, source: str, tokenizer: Tokenizer, begin: Sequence[int] = (), eos_ids: Sequence[int] = ()):
        if len(source) > MAX_TEMPLATE_CHARS:
            raise UserError(f"chat template: {len(source)} characters, but {MAX_TEMPLATE_CHARS} are read; shorten it")
        self.tokenizer, self.begin, self.source = tokenizer, list(begin), source
        self.renderer = Renderer()
        special = [token.content for token in tokenizer.engine.get_added_tokens_decoder().values() if token.special]
        longest_first = sorted(filter(None, special), key=len, reverse=True)
        self.specials = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        first = [*begin, *([tokenizer.roles["begin"]] if "begin" in tokenizer.roles else [])]
        self.names = {
            "bos_token": tokenizer.id_to_token(first[0]) if first else "",
            "eos_token": tokenizer.id_to_token(eos_ids[0]) if eos_ids else "",
        }

    def prompt(self, system: str, turns: Sequence[Turn]) -> list[int]:
        """The ids before the answer to the last turn."""
        messages = [
            (role, text) for turn in turns for role, text in (("user", turn.user), ("assistant", turn.assistant))
        ]
        return self.ids([*([("system", system)] if system else []), *messages[:-1]])

    def ids(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """The ids of (role, text) messages, up to the beginning of the assistant's."""
        separator = _unused([text for _, text in messages])
        # Split what looks like a special token inside a message by a separator, which is removed after rendering.
        texts = [self.specials.sub(lambda match: match[0][:1] + separator + match[0][1:], text) for _, text in messages]
        escaped = [{"role": role, "content": text} for (role, _), text in zip(messages, texts, strict=True)]
        rendered = self.renderer.render(self.source, {"messages": escaped, "add_generation_prompt": True, **self.names})
        specials = self.specials.findall(rendered)
        between = [text.replace(separator, "") for text in self.specials.split(rendered)]
        pieces = self.tokenizer.encode_batch(between)
        ids = list(pieces[0])
        for special, piece in zip(specials, pieces[1:], strict=True):
            ids += [self.tokenizer.vocabulary[special], *piece]
        return ids if ids[: len(self.begin)] == self.begin else [*self.begin, *ids]


def _unused(texts: Sequence[str]) -> str:
    """A noncharacter that is in none of the texts."""
    separator = next((each for each in NONCHARACTERS if not any(each in text for text in texts)), None)
    if separator is None:
        raise UserError("the text has every character of U+FDD0 to U+FDEF, which are not characters; leave one out")
    return separator


class Renderer:
    """Renders templates in a process of its own, started on first use and killed when it takes too long."""

    _process: subprocess.Popen[str] | None = None

    def __init__(self, seconds: float = RENDER_SECONDS):
        self.seconds = seconds
        self._lock, self._count = threading.Lock(), 0

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """The text of a template with these variables; a template that fails is a UserError."""
        with self._lock:
            self._count += 1
            request = {"number": self._count, "template": template, "variables": variables, "seconds": self.seconds}
            try:
                answer = json.loads(self._request(json.dumps(request)) or "{}")
                if answer.get("number") != self._count:  # the process ended
                    self.close()
                    answer = {}
            except BaseException:  # the answer to an interrupted request must not be taken for the next one
                self.close()
                raise
        if "text" in answer:
            return str(answer["text"])
        if "refused" in answer:
            raise UserError(f"the model's chat template refuses this conversation: {answer['refused']}")
        reason = answer.get("error", f"it takes more than {self.seconds:g} seconds, or too much memory")
        raise UserError(f"the model's chat template cannot be used ({reason}); take a model whose template works")

    def _request(self, line: str) -> str:
        """Send one line and return one line; empty if the process ended."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = _start()
            self._wait_ready(self._process)
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(self.seconds, process.kill)
        try:
            timer.start()
            process.stdin.write(line + "\n")
            process.stdin.flush()
            return process.stdout.readline()
        except OSError:  # it ended while we wrote
            return ""
        finally:
            timer.cancel()

    def _wait_ready(self, process: subprocess.Popen[str]) -> None:
        """Wait for the start, which does not count as the template's time."""
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
                with contextlib.suppress(OSError):  # unread output
                    pipe.close()
        process.wait()

    def __del__(self) -> None:
        self.close()


def _start() -> subprocess.Popen[str]:
    """Start the process: in a session and folder of its own, with no file but its pipes and no environment."""
    command = [sys.executable, "-I", "-X", "utf8", str(Path(rendering.__file__).resolve())]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        encoding="utf-8",
        cwd="/",
        env={name: os.environ[name] for name in PYTHON_NEEDS if name in os.environ},
        start_new_session=True,  # Ctrl-C is meant for this process; the other has no terminal
    )
