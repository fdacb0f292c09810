"""`clearhead demo`: a tiny model of each family, built, run and shown; one of them learns while you watch."""

import time
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from clearhead.model import EncoderDecoder

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PAD, BEGIN = 0, 1  # letters follow
SHADES, PLAIN_SHADES = " ░▒▓█", " .:*#"
FAMILIES = {
    "tiny-translator": "2017",
    "tiny-encoder": "BERT",
    "tiny-gpt": "GPT-2",
    "tiny-llama": "2024",
}


def demo(
    steps: Annotated[int, typer.Option(min=1, max=10_000, help="Training steps of the little translator.")] = 600,
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Where randomness begins.")] = 1,
) -> None:
    """Build a tiny model of each family, run it, and watch one learn to read backwards.

    Example: clearhead demo --steps 200
    """
    import torch
    from rich.console import Console

    torch.set_num_threads(1)  # models this small only wait for one another on several
    console = Console(highlight=False)
    console.print("[bold]Clearhead[/bold]: one Transformer core, four of its shapes, on this machine\n")
    show_families(console, seed)
    learn_to_reverse(console, steps, seed)
    console.print("\nTry next:")
    console.print("  .venv/bin/clearhead presets                      what there is, counted")
    console.print("  .venv/bin/clearhead presets gpt2 ff_width=1536   what a change saves")


def show_families(console: "Console", seed: int) -> None:
    """Build each tiny preset, run a batch through it, and say what came out."""
    import torch
    from rich.table import Table

    from clearhead.config import preset
    from clearhead.model import build
    from clearhead.model.measure import parameters

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("", "", "parameters", "scores", "a later token changes"):
        table.add_column(title, justify="right" if title == "parameters" else "left", no_wrap=True)
    torch.manual_seed(seed)
    for name, about in FAMILIES.items():
        network = build(preset(name)).eval()
        ids = torch.randint(4000, (2, 12))
        changed = ids.clone()
        changed[:, -1] = (ids[:, -1] + 1) % 4000  # the last token becomes another
        inputs = (ids,) if name == "tiny-translator" else ()  # a translator has a source, which stays as it is
        with torch.no_grad():
            out, other = network(*inputs, ids), network(*inputs, changed)
        moved = bool(((out - other)[:, :-1].abs() > 1e-6).any())
        effect = "earlier ones: reads both ways" if moved else "nothing earlier"
        table.add_row(name, about, f"{parameters(network):,}", "×".join(map(str, out.shape)), effect)
    console.print(table)


def learn_to_reverse(console: "Console", steps: int, seed: int) -> None:
    """Train a translator to write a word backwards, then show where its heads look."""
    import torch

    from clearhead.config import ModelConfig
    from clearhead.model import EncoderDecoder, build

    torch.manual_seed(seed)
    config = ModelConfig(
        family="encoder-decoder", encoder_layers=2, decoder_layers=1, width=64, heads=2, vocab_size=2 + len(LETTERS),
        norm_position="post", tie="all", scale_embedding=True, max_positions=16, init="xavier",
    )  # fmt: skip
    network = build(config)
    assert isinstance(network, EncoderDecoder)
    console.print("\n[bold]A translator from scratch[/bold]: letters in, the same letters backwards out\n")
    optimizer = torch.optim.Adam(network.parameters(), betas=(0.9, 0.98), eps=1e-9)
    begun, average = time.perf_counter(), 0.0
    for step in range(1, steps + 1):
        source, lengths = words_of_letters(64)
        target, inputs = reversed_words(source, lengths)
        logits = network(source, inputs, source_lengths=lengths, target_lengths=lengths)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:  # up over the first 60 steps, then down to nothing
            group["lr"] = 4e-3 * min(step / 60, (steps - step + 1) / steps)
        optimizer.step()
        average = loss.item() if step == 1 else 0.9 * average + 0.1 * loss.item()
        if step % max(1, steps // 8) == 0:
            word = write(network.eval(), "attention")
            network.train()
            left = (time.perf_counter() - begun) / step * (steps - step)
            console.print(
                f"  step {step:>4} of {steps}   loss {average:5.3f}   attention → {word}   {left:3.0f} s left"
            )
    show_alignment(console, network.eval(), "clearhead")


def words_of_letters(rows: int, longest: int = 10) -> tuple["Tensor", "Tensor"]:
    """Random words: ids (rows, longest) with padding, and their lengths (rows,)."""
    import torch

    lengths = torch.randint(3, longest + 1, (rows,))
    ids = torch.randint(2, 2 + len(LETTERS), (rows, longest))
    return ids.masked_fill(torch.arange(longest) >= lengths[:, None], PAD), lengths


def reversed_words(source: "Tensor", lengths: "Tensor") -> tuple["Tensor", "Tensor"]:
    """The words backwards, as the target and as what the decoder is given: the target shifted right behind BEGIN."""
    import torch

    places = (lengths[:, None] - 1 - torch.arange(source.shape[1])).clamp(min=0)
    target = source.gather(1, places).masked_fill(source == PAD, PAD)
    return target, torch.cat([torch.full_like(target[:, :1], BEGIN), target[:, :-1]], dim=1)


def write(network: "EncoderDecoder", word: str) -> str:
    """What the network writes for a word: the best letter each time, over a key-value cache."""
    import torch

    from clearhead.model import Cache

    with torch.no_grad():
        memory = network.encode(torch.tensor([[2 + LETTERS.index(letter) for letter in word]]))
        cache, token, letters = Cache(network.config, rows=1, capacity=len(word)), torch.tensor([[BEGIN]]), ""
        for _ in word:
            token = network.words(network.decode(token, memory, cache=cache))[..., 2:].argmax(-1) + 2
            letters += LETTERS[int(token) - 2]
    return letters


def show_alignment(console: "Console", network: "EncoderDecoder", word: str) -> None:
    """Where the decoder's heads look in the source while the word is written, as shades."""
    import torch

    from clearhead.inside import watch

    written = write(network, word)
    source = torch.tensor([[2 + LETTERS.index(letter) for letter in word]])
    inputs = torch.tensor([[BEGIN] + [2 + LETTERS.index(letter) for letter in written[:-1]]])
    with torch.no_grad(), watch(network) as looks:
        network(source, inputs)
    weights = looks["decoder.layers.0.cross_attention"].weights[0]  # (H, T, S)
    shades = SHADES if encodable(SHADES, console.encoding) else PLAIN_SHADES
    console.print(f"\n  {word} → [bold]{written}[/bold]; each row a letter written, each column a letter read\n")
    titles = [f"head {number + 1}" for number in range(len(weights))]
    console.print("     " + "     ".join(f"{title:<{2 * len(word)}}" for title in titles))
    console.print("     " + "     ".join("".join(f"{letter} " for letter in word) for _ in titles))
    for row, letter in enumerate(written):
        rows = ["".join(2 * shades[min(4, int(5 * weight))] for weight in head[row].tolist()) for head in weights]
        console.print(f"   {letter} " + "     ".join(rows))


def encodable(text: str, encoding: str) -> bool:
    """Whether a terminal of this encoding can show the text."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True
