"""The position-wise feed-forward sublayer.   B batch · T tokens · D model dim · F feed-forward dim"""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.config import ModelConfig
from clearhead.ops.gelu import gelu_tanh

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "silu": F.silu,
    "swiglu": F.silu,  # of the gate projection, like geglu
    "geglu": F.gelu,
}


class FeedForward(nn.Module):
    """down(activation(up(x))), section 3.3; with SwiGLU or GeGLU, down(activation(gate(x)) · up(x))."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        self.gate = nn.Linear(config.dim, config.ff_dim, bias=config.bias) if config.is_gated else None
        self.up = nn.Linear(config.dim, config.ff_dim, bias=config.bias)
        self.down = nn.Linear(config.ff_dim, config.dim, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        if self.gate is not None:
            hidden = self.activation(self.gate(x)) * self.up(x)  # (B, T, F)
        else:
            hidden = self.activation(self.up(x))  # (B, T, F)
        return self.down(hidden)
