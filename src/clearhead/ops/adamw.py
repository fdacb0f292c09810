"""Fused AdamW in Triton for captured training steps, with bf16 copies of the matmul weights.

Matmuls run in bf16 and the optimizer updates fp32 weights. Casting every weight and gradient in every step takes
hundreds of small kernels; here one kernel reads bf16 gradients, clips them, updates the weights and writes their bf16
copies.
"""

# mypy: disable-error-code="import-not-found, untyped-decorator, no-untyped-def, unused-ignore"

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

try:
    import triton
    from triton import language as tl
except ImportError:  # no Triton on this platform; torch.optim.AdamW does the same
    triton = None

BLOCK, WARPS = 1024, 4  # elements per program, tuned on an H200
BLOCKS_PER_NORM = 8  # blocks whose gradients one program squares for the norm


def fused_adamw_supports(device: torch.device, dtype: torch.dtype, parameters: Iterable[Tensor]) -> bool:
    """Whether the kernel runs here: CUDA with Triton, bf16 matmuls, and contiguous, aligned fp32 parameters."""
    if triton is None or device.type != "cuda" or dtype != torch.bfloat16:
        return False
    return all(p.dtype == torch.float32 and p.is_contiguous() and p.data_ptr() % 16 == 0 for p in parameters)


class FusedAdamW:
    """Steps a torch AdamW optimizer, using its state, and keeps `bf16_weights`, copies by name.

    All parameter groups share a learning rate; weight decay may differ. Each parameter gets a gradient in every step or
    in none, so that all updated parameters have the same step count.
    """

    def __init__(self, optimizer: torch.optim.AdamW, matmul_weights: Mapping[str, nn.Parameter], dtype: torch.dtype):
        """`matmul_weights` are the weights used in matmuls, by name; those that are trained get a copy in `dtype`."""
        self.settings = optimizer.param_groups[0]
        self.parameters: list[nn.Parameter] = [p for group in optimizer.param_groups for p in group["params"]]
        copies = {p: p.detach().to(dtype).requires_grad_() for p in matmul_weights.values() if p.requires_grad}
        self.parameter_copies = [copies.get(p) for p in self.parameters]  # None: this parameter has no copy
        self.bf16_weights = {name: copies[p] for name, p in matmul_weights.items() if p in copies}
        states = [_state(optimizer, p) for p in self.parameters]
        self.steps = [state["step"] for state in states]
        device = self.parameters[0].device
        rows = [
            [p.data_ptr(), state["exp_avg"].data_ptr(), state["exp_avg_sq"].data_ptr(), _pointer(copy), p.numel()]
            for p, copy, state in zip(self.parameters, self.parameter_copies, states, strict=True)
        ]
        self.table = torch.tensor(rows, device=device)  # pointers and sizes, (parameters, 5)
        decays = [group["weight_decay"] for group in optimizer.param_groups for _ in group["params"]]
        self.decays = torch.tensor(decays, device=device)
        blocks = [(index, start) for index, row in enumerate(rows) for start in range(0, row[-1], BLOCK)]
        empty_block = (0, -(-rows[0][-1] // BLOCK) * BLOCK)  # past the end of the first parameter
        blocks += [empty_block] * (-len(blocks) % BLOCKS_PER_NORM)
        self.blocks = torch.tensor(blocks, device=device, dtype=torch.int32)  # (blocks, 2): parameter and offset
        self.aligned = all(row[-1] % 16 == 0 for row in rows)  # sizes that allow vectorized loads and stores
        self.betas = torch.tensor(self.settings["betas"], device=device, dtype=torch.float64)

    def refresh_copies(self) -> None:
        """Update the copies after something else has changed the weights."""
        pairs = [(copy, p) for copy, p in zip(self.parameter_copies, self.parameters, strict=True) if copy is not None]
        if pairs:  # _foreach_copy_ refuses empty lists; there are no copies where all matmul weights are frozen
            with torch.no_grad():
                torch._foreach_copy_([copy for copy, _ in pairs], [p for _, p in pairs])

    def zero_grad(self) -> None:
        """Release all gradients."""
        for tensor in (*self.parameters, *self.bf16_weights.values()):
            tensor.grad = None

    def new_grad_pointers(self) -> Tensor:
        """Allocate the pinned gradient pointer table of a step; a captured graph reads it at every replay."""
        return torch.empty(len(self.parameters), dtype=torch.int64, pin_memory=self.table.is_cuda)

    def step(self, max_norm: float | None, grad_pointers: Tensor) -> Tensor:
        """Clip the gradients to `max_norm` and update the weights, unless they are not finite; return their norm."""
        trained = [p if copy is None else copy for p, copy in zip(self.parameters, self.parameter_copies, strict=True)]
        grads = [None if x.grad is None else _aligned(x.grad.contiguous()) for x in trained]
        grad_pointers.copy_(torch.tensor([_pointer(grad) for grad in grads]))
        pointers = grad_pointers.to(self.table.device, non_blocking=True)
        sums = torch.empty(len(self.blocks) // BLOCKS_PER_NORM, device=pointers.device)
        _squared_norms[sums.shape](
            self.table, pointers, self.blocks, sums, BLOCKS_PER_NORM, BLOCK, self.aligned, num_warps=WARPS
        )
        norm = sums.sum().sqrt()
        finite = norm.isfinite().float()
        steps = [step for step, grad in zip(self.steps, grads, strict=True) if grad is not None]
        torch._foreach_add_(steps, [finite] * len(steps))
        clip = torch.ones_like(norm) if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1.0)
        _adamw[(len(self.blocks),)](
            self.table, pointers, self.blocks, self.decays, self.settings["lr"], 1 - self.betas ** steps[0], clip,
            finite, *self.settings["betas"], self.settings["eps"], BLOCK, self.aligned, num_warps=WARPS,
        )  # fmt: skip
        self.zero_grad()
        return norm


def _aligned(grad: Tensor) -> Tensor:
    """Return the gradient at a 16-byte boundary; torch allocates there, but a view may start elsewhere."""
    return grad if grad.data_ptr() % 16 == 0 else grad.clone()


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _state(optimizer: torch.optim.AdamW, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return a parameter's optimizer state, initialized as torch does before the first step."""
    state: dict[str, Tensor] = optimizer.state[parameter]
    if not state:  # allocate everything before updating, so that running out of memory leaves no partial state
        step = torch.zeros((), device=parameter.device)
        exp_avg, exp_avg_sq = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state.update(step=step, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    return state


if triton is not None:

    @triton.jit
    def _at(pointer, dtype: tl.constexpr):
        """Cast an integer address to a 16-byte aligned pointer."""
        return tl.multiple_of(pointer.to(tl.pointer_type(dtype)), 16)

    @triton.jit
    def _load_block(block_id, table, grads, blocks, block: tl.constexpr, aligned: tl.constexpr):
        """Return a block's parameter index, offsets, mask and gradient in fp32."""
        index, first = tl.load(blocks + 2 * block_id), tl.load(blocks + 2 * block_id + 1)
        row, grad = table + 5 * index, tl.load(grads + index)
        at, size = tl.multiple_of(first, block) + tl.arange(0, block), tl.where(grad == 0, 0, tl.load(row + 4))
        mask = at < (tl.multiple_of(size, 16) if aligned else size)
        if tl.load(row + 3) != 0:  # a bf16 copy has the gradient
            g = tl.load(_at(grad, tl.bfloat16) + at, mask=mask, other=0.0).to(tl.float32)
        else:
            g = tl.load(_at(grad, tl.float32) + at, mask=mask, other=0.0)
        return index, at, mask, g

    @triton.jit
    def _squared_norms(
        table, grads, blocks, sums, blocks_per_norm: tl.constexpr, block: tl.constexpr, aligned: tl.constexpr
    ):
        """Sum of squares of a few blocks of gradients per program."""
        total = tl.zeros((block,), tl.float32)
        for n in tl.static_range(blocks_per_norm):
            _, _, _, g = _load_block(tl.program_id(0) * blocks_per_norm + n, table, grads, blocks, block, aligned)
            total += g * g
        tl.store(sums + tl.program_id(0), tl.sum(total, 0))

    @triton.jit
    def _adamw(
        table, grads, blocks, decays, lr, corrections, clip, finite, beta1, beta2, eps,
        block: tl.constexpr, aligned: tl.constexpr,
    ):  # fmt: skip
        """Update one block of a parameter per program."""
        if tl.load(finite) == 1.0:
            index, at, mask, g = _load_block(tl.program_id(0), table, grads, blocks, block, aligned)
            row, step_size = table + 5 * index, tl.load(lr)
            weights = _at(tl.load(row), tl.float32) + at
            exp_avgs = _at(tl.load(row + 1), tl.float32) + at
            exp_avg_sqs = _at(tl.load(row + 2), tl.float32) + at
            w, m, v = tl.load(weights, mask=mask), tl.load(exp_avgs, mask=mask), tl.load(exp_avg_sqs, mask=mask)
            g *= tl.load(clip)
            m += (1 - beta1) * (g - m)
            v = beta2 * v + (1 - beta2) * g * g
            w -= step_size * tl.load(decays + index) * w
            inv_correction = 1.0 / tl.sqrt(tl.load(corrections + 1).to(tl.float32))
            w -= step_size / tl.load(corrections).to(tl.float32) * m / (tl.sqrt(v) * inv_correction + eps)
            tl.store(weights, w, mask=mask)
            tl.store(exp_avgs, m, mask=mask)
            tl.store(exp_avg_sqs, v, mask=mask)
            copy = tl.load(row + 3)
            if copy != 0:
                tl.store(_at(copy, tl.bfloat16) + at, w.to(tl.bfloat16), mask=mask)
