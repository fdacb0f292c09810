"""Ctrl-C at random moments of chat, generate and library calls; the next answer must equal an undisturbed one.

`python -m tests.cli.interruptions FOLDER COUNT SEED` interrupts each of them COUNT times and prints the counts.
"""

import json
import os
import random
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from tests.cli.forked import run
from tests.cli.models import make

QUESTIONS = ("hello", "the dog", "a man", "how are you?")
# takes about 10 ms, so that many interruptions meet the rendering
TEMPLATE = (
    "{% for a in range(9999) %}{% for b in range(3) %}{% endfor %}{% endfor %}"
    "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}\n{% endfor %}"
)
CHAT = ["chat", "gpt", "--temperature", "0", "--max-new-tokens", "30"]
GENERATE = ["generate", "gpt", "a man", "--stream", "--temperature", "0", "--max-new-tokens", "100"]
SECONDS = 60  # of any wait


class Terminal:
    """A command in a forked process that has a terminal of its own."""

    def __init__(self, arguments: list[str]):
        self.pid, self.end = os.forkpty()
        if self.pid == 0:
            os.environ["TERM"] = "dumb"
            sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", 1)
            run(arguments)
        self.output = ""

    def read_until(self, text: str) -> str:
        """What came before a text."""
        limit = time.monotonic() + SECONDS
        while text not in self.output:
            assert time.monotonic() < limit, f"{text!r} does not come after {self.output!r}"
            self.receive()
        before, _, self.output = self.output.partition(text)
        return before

    def receive(self) -> None:
        """Read what has been shown."""
        try:
            if select.select([self.end], [], [], 0.1)[0]:
                self.output += os.read(self.end, 1 << 16).decode(errors="replace").replace("\r", "")
        except OSError:
            raise AssertionError(f"ended with {self.wait()} after {self.output!r}") from None

    def type(self, line: str) -> None:
        """Type a line."""
        os.write(self.end, line.encode() + b"\n")

    def interrupt(self, typed: bool) -> None:
        """Press Ctrl-C, or send its signal to this process only."""
        if typed:
            os.write(self.end, b"\x03")
        else:
            os.kill(self.pid, signal.SIGINT)

    def next_prompt(self, number: int) -> str:
        """Return what is shown up to the prompt after Ctrl-C, which discards what was typed before it is handled."""
        for attempt in range(SECONDS):
            mark, limit = f"unknown command /mark{number}.{attempt}", time.monotonic() + 1
            self.type(mark.partition(" command ")[2])
            while mark not in self.output and time.monotonic() < limit:
                self.receive()
            if mark in self.output:
                break
        shown = self.read_until(mark)
        self.read_until("You: ")
        return shown

    def ask(self, question: str) -> str:
        """The answer to a question after /reset."""
        self.type("/reset")
        self.read_until("(conversation cleared)")
        self.read_until("You: ")
        self.type(question)
        self.read_until("Model: ")
        return self.read_until("You: ")

    def wait(self) -> int:
        """The exit code."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.end)
        return code


def interrupt_chat(count: int, chance: random.Random) -> Counter[str]:
    """Interrupt questions, also twice in a row, and ask another one each time."""
    counts: Counter[str] = Counter()
    terminal = Terminal(CHAT)
    terminal.read_until("You: ")
    expected = {question: terminal.ask(question) for question in QUESTIONS}
    begun = time.monotonic()
    assert expected == {question: terminal.ask(question) for question in QUESTIONS}
    seconds = (time.monotonic() - begun) / len(QUESTIONS)
    assert len(set(expected.values())) == len(QUESTIONS), expected
    for number in range(count):
        interrupted, asked = chance.sample(QUESTIONS, 2)
        terminal.type(interrupted)
        for _ in range(1 + (chance.random() < 0.2)):
            time.sleep(chance.uniform(0, seconds))
            terminal.interrupt(typed=chance.random() < 0.5)
        shown = terminal.next_prompt(number)
        where = (
            "answering" if " …" in shown and "Model: " in shown else "rendering" if " …" in shown else "at the prompt"
        )
        counts[f"chat: {where}"] += 1
        answer = terminal.ask(asked)
        assert answer == expected[asked], (number, where, interrupted, asked, answer, expected)
        assert "Traceback" not in shown, shown
        assert "ignored" not in shown, shown
    terminal.type("/quit")
    assert terminal.wait() == 0
    return counts


def interrupt_generate(count: int, chance: random.Random) -> Counter[str]:
    """Interrupt the command: it has printed the beginning of the undisturbed text and nothing else."""
    counts: Counter[str] = Counter()
    begun = time.monotonic()
    code, expected, errors = generate(None)
    seconds = time.monotonic() - begun
    assert (code, errors) == (0, ""), errors
    for _ in range(count):
        code, text, errors = generate(chance.uniform(0, 1.1 * seconds))
        assert errors == "", errors
        assert expected.startswith(text), (text, expected)
        assert code == 130 or (code == 0 and text == expected) or (code == -signal.SIGINT and text in ("", expected))
        counts[f"generate: {'complete' if text == expected else 'interrupted' if text else 'before its text'}"] += 1
    return counts


def generate(seconds: float | None) -> tuple[int, str, str]:
    """Run the command, interrupt it after some seconds, and return its exit code, text and errors."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        pid = os.fork()
        if pid == 0:
            for number, file in ((1, output), (2, errors)):
                os.dup2(file.fileno(), number)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", 1)
            run(GENERATE)
        if seconds is not None:
            time.sleep(seconds)
            os.kill(pid, signal.SIGINT)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        for file in (output, errors):
            file.seek(0)
        return code, output.read().decode(), errors.read().decode()


def interrupt_calls(count: int, chance: random.Random) -> Counter[str]:
    """Interrupt calls of a loaded model by a timer, and repeat them undisturbed."""
    import clearhead

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    counts: Counter[str] = Counter()
    gpt, translator = clearhead.load("gpt", "cpu"), clearhead.load("tr", "cpu")
    chat = gpt.chat(max_new_tokens=20)

    def ask() -> str:
        chat.reset()
        return chat.ask("the dog")

    calls: dict[str, Callable[[], Any]] = {
        "stream": lambda: list(gpt.stream("a man", max_new_tokens=60)),
        "generate": lambda: gpt.generate("the dog", max_new_tokens=60),
        "translate": lambda: translator.translate("a man sees the dog", beam=4),
        "chat": ask,
    }
    signal.signal(signal.SIGALRM, interrupt)
    expected, seconds = {}, {}
    for name, call in calls.items():
        call()
        begun = time.monotonic()
        expected[name], seconds[name] = call(), time.monotonic() - begun
    for number in range(count):
        name = chance.choice(list(calls))
        try:
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-4, 1.1 * seconds[name]))
            calls[name]()
            signal.setitimer(signal.ITIMER_REAL, 0)
            counts[f"library {name}: complete"] += 1
        except KeyboardInterrupt:
            counts[f"library {name}: interrupted"] += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        other = chance.choice(list(calls))
        assert calls[other]() == expected[other], (number, name, other)
    return counts


def main(folder: str, count: int, seed: int) -> None:
    """Run the three campaigns with tiny models in a folder."""
    import clearhead.cli.console
    import clearhead.predict  # noqa: F401 (imports torch once)

    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as `python -m clearhead` begins
    for name, base in (("gpt", "tiny-gpt"), ("tr", "tiny-translator")):
        make(Path(name), base)
    teach(Path("gpt"))
    chance = random.Random(seed)
    counts = interrupt_generate(count, chance) + interrupt_chat(count, chance) + interrupt_calls(count, chance)
    for name, number in sorted(counts.items()):
        print(f"{name}: {number}")


def teach(folder: Path) -> None:
    """Add the chat template to a model folder."""
    from clearhead.checkpoint import disk

    config = json.loads((folder / "config.json").read_text()) | {"chat_template": TEMPLATE}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / disk.MANIFEST).unlink()
    disk._write_manifest(folder)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
