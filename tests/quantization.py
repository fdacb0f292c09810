"""QuantizedLinear in place of every linear layer of a network, for tests of the portable int8 and int4 layers."""

from torch import nn

from clearhead.ops.linear.quantized import QuantizedLinear


def quantize_module(module: nn.Module, bits: int = 8) -> nn.Module:
    """Replace every linear layer below `module` in place, except those that int4 groups do not divide."""
    for name, child in list(module.named_children()):
        if not isinstance(child, nn.Linear):
            quantize_module(child, bits)
        elif bits == 8 or child.in_features % 32 == 0:
            setattr(module, name, QuantizedLinear(child, bits))
    return module
