"""AdamW in one kernel for recorded steps on a GPU, which keeps narrow copies of the matrices for the products.

Products are computed in bf16 and weights learn in fp32. Cast anew at every step, and their gradients back, they are
hundreds of kernels that each take as long to begin as to run; here the update reads narrow gradients as they come,
shortens them on the way, and leaves the narrow copy of what it made.
"""

# mypy: disable-error-code="import-not-found, untyped-decorator, no-untyped-def, unused-ignore"

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

try:
    import triton
    from triton import language as tl
except ImportError:  # there is none for this platform; torch's own optimizer does the same
    triton = None

BLOCK, WARPS = 1024, 4  # numbers that a program updates, as an H200 likes it
TOGETHER = 8  # so many times as many are squared by one


def fused_adamw_supports(device: torch.device, dtype: torch.dtype, learning: Iterable[Tensor]) -> bool:
    """Whether this machine can use it, narrow copies are of use, and the weights lie as the kernel reads them."""
    if triton is None or device.type != "cuda" or dtype != torch.bfloat16:
        return False
    return all(p.dtype == torch.float32 and p.is_contiguous() and p.data_ptr() % 16 == 0 for p in learning)


class Adam:
    """Steps an optimizer of torch's, whose state it uses, and holds `copies`, the narrow weights by their names.

    All groups of the optimizer learn at one rate; their decay may differ. A parameter gets a gradient at every step or
    at none: all those that learn are at the same step.
    """

    def __init__(self, optimizer: torch.optim.AdamW, products: Mapping[str, nn.Parameter], dtype: torch.dtype):
        """`products` are the weights that matrix products use, by their names."""
        self.settings = optimizer.param_groups[0]
        self.learning: list[nn.Parameter] = [p for group in optimizer.param_groups for p in group["params"]]
        narrow = {p: p.detach().to(dtype).requires_grad_() for p in products.values() if p.requires_grad}
        self.narrow = [narrow.get(p) for p in self.learning]
        self.copies = {name: narrow[p] for name, p in products.items() if p in narrow}
        states = [_state(optimizer, p) for p in self.learning]
        self.steps = [state["step"] for state in states]
        device = self.learning[0].device
        rows = [
            [p.data_ptr(), state["exp_avg"].data_ptr(), state["exp_avg_sq"].data_ptr(), _place(copy), p.numel()]
            for p, copy, state in zip(self.learning, self.narrow, states, strict=True)
        ]
        self.table = torch.tensor(rows, device=device)  # where everything is, (parameters, 5)
        decays = [group["weight_decay"] for group in optimizer.param_groups for _ in group["params"]]
        self.decays = torch.tensor(decays, device=device)
        pieces = [(number, at) for number, row in enumerate(rows) for at in range(0, row[-1], BLOCK)]
        nothing = (0, -(-rows[0][-1] // BLOCK) * BLOCK)  # behind the end of the first
        pieces += [nothing] * (-len(pieces) % TOGETHER)
        self.pieces = torch.tensor(pieces, device=device, dtype=torch.int32)
        self.even = all(row[-1] % 16 == 0 for row in rows)  # then memory is read and written in wide words
        self.betas = torch.tensor(self.settings["betas"], device=device, dtype=torch.float64)

    def refresh(self) -> None:
        """Make the copies anew, after something else has changed the weights."""
        both = [(copy, p) for copy, p in zip(self.narrow, self.learning, strict=True) if copy is not None]
        if both:  # torch takes no empty lists; where all layers are frozen, there is nothing to copy
            with torch.no_grad():
                torch._foreach_copy_([copy for copy, _ in both], [p for _, p in both])

    def zero_grad(self) -> None:
        """Let go of all gradients."""
        for tensor in (*self.learning, *self.copies.values()):
            tensor.grad = None

    def places(self) -> Tensor:
        """Room for a step to note where gradients are; a recording must keep it, and reads it at every replay."""
        return torch.empty(len(self.learning), dtype=torch.int64, pin_memory=self.table.is_cuda)

    def step(self, max_length: float | None, places: Tensor) -> Tensor:
        """One update by gradients shortened to `longest`; none where they are not finite. The length they had."""
        found = [p.grad if copy is None else copy.grad for p, copy in zip(self.learning, self.narrow, strict=True)]
        grads = [None if grad is None else _aligned(grad.contiguous()) for grad in found]
        places.copy_(torch.tensor([_place(grad) for grad in grads]))
        there = places.to(self.table.device, non_blocking=True)
        squares, grid = torch.empty(len(self.pieces) // TOGETHER, device=there.device), (len(self.pieces),)
        _square[squares.shape](self.table, there, self.pieces, squares, TOGETHER, BLOCK, self.even, num_warps=WARPS)
        norm = squares.sum().sqrt()
        finite = norm.isfinite().float()
        steps = [step for step, grad in zip(self.steps, grads, strict=True) if grad is not None]
        torch._foreach_add_(steps, [finite] * len(steps))
        scale = torch.ones_like(norm) if max_length is None else (max_length / (norm + 1e-6)).clamp(max=1.0)
        _update[grid](
            self.table, there, self.pieces, self.decays, self.settings["lr"], 1 - self.betas ** steps[0], scale, finite,
            *self.settings["betas"], self.settings["eps"], BLOCK, self.even, num_warps=WARPS,
        )  # fmt: skip
        self.zero_grad()
        return norm


def _aligned(grad: Tensor) -> Tensor:
    """The same where wide words can be read; what torch allocates begins there, a part of it may not."""
    return grad if grad.data_ptr() % 16 == 0 else grad.clone()


def _place(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _state(optimizer: torch.optim.AdamW, parameter: nn.Parameter) -> dict[str, Tensor]:
    state: dict[str, Tensor] = optimizer.state[parameter]
    if not state:  # as torch does before its first step; all of it or, where there is no memory, nothing
        step, mean, square = torch.zeros((), device=parameter.device), *map(torch.zeros_like, (parameter, parameter))
        state.update(step=step, exp_avg=mean, exp_avg_sq=square)
    return state


if triton is not None:

    @triton.jit
    def _at(place, dtype: tl.constexpr):
        """The tensor at an address, as torch aligns it."""
        return tl.multiple_of(place.to(tl.pointer_type(dtype)), 16)

    @triton.jit
    def _piece(piece, table, gradients, pieces, block: tl.constexpr, even: tl.constexpr):
        """What a program works on: which row of the table, where, how far, and the gradient in fp32."""
        number, first = tl.load(pieces + 2 * piece), tl.load(pieces + 2 * piece + 1)
        row, place = table + 5 * number, tl.load(gradients + number)
        at, size = tl.multiple_of(first, block) + tl.arange(0, block), tl.where(place == 0, 0, tl.load(row + 4))
        inside = at < (tl.multiple_of(size, 16) if even else size)
        if tl.load(row + 3) != 0:  # the gradient is that of a narrow copy
            g = tl.load(_at(place, tl.bfloat16) + at, mask=inside, other=0.0).to(tl.float32)
        else:
            g = tl.load(_at(place, tl.float32) + at, mask=inside, other=0.0)
        return number, at, inside, g

    @triton.jit
    def _square(table, gradients, pieces, squares, together: tl.constexpr, block: tl.constexpr, even: tl.constexpr):
        """A program for some pieces of gradients: the sum of their squares."""
        total = tl.zeros((block,), tl.float32)
        for piece in tl.static_range(together):
            _, _, _, g = _piece(tl.program_id(0) * together + piece, table, gradients, pieces, block, even)
            total += g * g
        tl.store(squares + tl.program_id(0), tl.sum(total, 0))

    @triton.jit
    def _update(
        table, gradients, pieces, decays, rate, corrections, scale, finite, beta1, beta2, eps,
        block: tl.constexpr, even: tl.constexpr,
    ):  # fmt: skip
        """A program for each piece of a parameter."""
        if tl.load(finite) == 1.0:
            number, at, inside, g = _piece(tl.program_id(0), table, gradients, pieces, block, even)
            row, step = table + 5 * number, tl.load(rate)
            weights = _at(tl.load(row), tl.float32) + at
            means = _at(tl.load(row + 1), tl.float32) + at
            squares = _at(tl.load(row + 2), tl.float32) + at
            w, m, v = tl.load(weights, mask=inside), tl.load(means, mask=inside), tl.load(squares, mask=inside)
            g *= tl.load(scale)
            m += (1 - beta1) * (g - m)
            v = beta2 * v + (1 - beta2) * g * g
            w -= step * tl.load(decays + number) * w
            wider = 1.0 / tl.sqrt(tl.load(corrections + 1).to(tl.float32))
            w -= step / tl.load(corrections).to(tl.float32) * m / (tl.sqrt(v) * wider + eps)
            tl.store(weights, w, mask=inside)
            tl.store(means, m, mask=inside)
            tl.store(squares, v, mask=inside)
            copy = tl.load(row + 3)
            if copy != 0:
                tl.store(_at(copy, tl.bfloat16) + at, w.to(tl.bfloat16), mask=inside)
