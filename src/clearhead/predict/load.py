"""Load a model by name, ready to use."""

from __future__ import annotations

from pathlib import Path

import torch

from clearhead.checkpoint import load_model
from clearhead.config.dtypes import DTYPES, parse_dtype
from clearhead.errors import UserError
from clearhead.inference import INT4, enable_cuda_graphs, optimize_for_inference
from clearhead.inference.native_network import native_refuses
from clearhead.model import Decoder, Network
from clearhead.ops.device import choose_device
from clearhead.ops.linear.quantized_tensor import QuantizedTensor, dequantize_network, has_quantized
from clearhead.predict.find import find_model
from clearhead.predict.model import Model


def load(name: str | Path, device: str = "auto", dtype: str | None = None, compiled: bool = False) -> Model:
    """Load a model by name, model folder or run folder.

    `dtype` is fp32, bf16, fp16, fp64, int8 or int4 (or torch's name); without it, as stored: weights imported from a
    quantized file stay quantized on a CPU. With `compiled`, a decoder on a GPU takes tens of seconds for the first call
    with each batch size; later calls are faster.
    """
    target = choose_device(device)
    kind: torch.dtype | None = None if dtype is None else getattr(torch, DTYPES[parse_dtype(dtype)])
    folder = find_model(name)
    quantized = kind in (torch.int8, INT4)
    loaded = load_model(folder, target, None if quantized else kind)
    _check_finite(loaded.network, folder)
    enable_cuda_graphs(loaded.network, compiled)
    network = loaded.network
    if kind is None and has_quantized(network) and native_refuses(network):
        dequantize_network(network)  # no kernels for its weights
    if quantized and isinstance(network, Decoder) and target.type == "cpu" and native_refuses(network, kind):
        network = optimize_for_inference(network, kind)  # keep only the quantized weights
    return Model(network, loaded.tokenizers, loaded.extra, str(name), kind, folder)


def _check_finite(network: Network, folder: Path) -> None:
    """Refuse weights that hold NaN or infinity."""
    for name, tensor in network.state_dict().items():
        parts = [tensor.scales, tensor.minima] if isinstance(tensor, QuantizedTensor) else [tensor]
        if any(part is not None and part.is_floating_point() and not part.isfinite().all() for part in parts):
            raise UserError(f"{folder}: {name} contains NaN or infinity; use an earlier checkpoint, or train again")
