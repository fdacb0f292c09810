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
# Printable and without case, so that templates that quote, trim or lower messages leave them unchanged: Tangut.
STAND_INS = [chr(code) for code in range(0x17000, 0x187F8)]
PYTHON_NEEDS = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")  # environment variables, to start at all


class Turn(NamedTuple):
    """A message of the user, and the assistant's answer so far."""

    user: str
    assistant: str = ""


class Template:
    """A chat template; special tokens count where the template writes them, never inside a message.

    Every prompt is rendered twice: as it is, and with stand-ins for all letters of messages that special tokens have,
    in any case. The second has the template's special tokens only, whatever the template does with messages. If the
    first has the same, it is the prompt, with the ids that transformers gives; else the second is, and its stand-ins
    are replaced by what they stand for once its special tokens are found.
    """

    stops: tuple[str, ...] = ()  # the model ends its answers itself

    def __init__(self, source: str, tokenizer: Tokenizer, begin: Sequence[int] = (), eos_ids: Sequence[int] = ()):
        if len(source) > MAX_TEMPLATE_CHARS:
            raise UserError(f"chat template: {len(source)} characters; at most {MAX_TEMPLATE_CHARS} are allowed")
        self.tokenizer, self.begin, self.source = tokenizer, list(begin), source
        self.renderer = Renderer()
        longest_first = sorted(filter(None, tokenizer.special_tokens), key=len, reverse=True)
        self.specials = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self.letters = {form for letter in "".join(longest_first) if not letter.isspace() for form in _cases(letter)}
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
        texts = [text for _, text in messages]
        restore = self._stand_ins(texts)
        replace = str.maketrans({letter: stand_in for stand_in, letter in restore.items()})
        masked = self._render([(role, text.translate(replace)) for role, text in messages])
        specials = [self.tokenizer.special_tokens[name] for name in self.specials.findall(masked)]
        ids = self._natural_ids(messages, specials)
        if ids is None:
            original = {ord(stand_in): letter for stand_in, letter in restore.items()}
            pieces = self.tokenizer.encode_batch([text.translate(original) for text in self.specials.split(masked)])
            ids = list(pieces[0])
            for special, piece in zip(specials, pieces[1:], strict=True):
                ids += [special, *piece]
        return ids if ids[: len(self.begin)] == self.begin else [*self.begin, *ids]

    def _natural_ids(self, messages: Sequence[tuple[str, str]], specials: Sequence[int]) -> list[int] | None:
        """The ids of the messages as they are; None if they have other special tokens than `specials`."""
        if any(self.specials.search(text) for _, text in messages):
            return None
        ids = self.tokenizer.encode(self._render(messages), special_tokens=True)
        known = {*self.tokenizer.marker_ids, *specials}
        return ids if [each for each in ids if each in known] == list(specials) else None

    def _render(self, messages: Sequence[tuple[str, str]]) -> str:
        listed = [{"role": role, "content": text} for role, text in messages]
        return self.renderer.render(self.source, {"messages": listed, "add_generation_prompt": True, **self.names})

    def _stand_ins(self, texts: Sequence[str]) -> dict[str, str]:
        """Stand-ins, and what they stand for: every letter of the texts that is part of a special token in any case."""
        letters = sorted(letter for letter in {*"".join(texts)} if not self.letters.isdisjoint(_cases(letter)))
        taken = {*"".join(texts), *self.source, *"".join(self.names.values())}
        free = [letter for letter in STAND_INS if letter not in taken]
        if len(free) < len(letters):
            raise UserError("the text uses nearly all Tangut characters, which are needed as placeholders; remove some")
        return dict(zip(free, letters, strict=False))


def _cases(letter: str) -> set[str]:
    """A letter and what lower, upper and title make of it."""
    return {letter, *letter.lower(), *letter.upper(), *letter.title(), *letter.casefold()}


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
