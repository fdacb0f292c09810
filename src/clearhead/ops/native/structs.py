"""The library of native inference steps (step/*.c): its structs for ctypes, loading, and single operations.

step/*.c is compiled when the package is installed, if there is a C compiler; without it, or with CLEARHEAD_NATIVE=0,
the network runs on PyTorch ops. CLEARHEAD_NATIVE=portable, avx2 or avx512 forces the instructions used.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sysconfig
from ctypes import c_double, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

log = logging.getLogger("clearhead")
ABI = 5  # must equal ABI in step.h
LANES, PAD_TO = 16, 64
LEVELS = ("portable", "avx2", "avx512")
BEST_LEVEL = -1
ERRORS = {
    1: "native step: an id, row, position, slot or page is out of range",
    2: "native step: the workspace is too small",
    3: "native step: this CPU does not have the instructions that CLEARHEAD_NATIVE asks for; unset it",
}


class LinearStruct(ctypes.Structure):
    """Mirrors `struct linear`."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("weight", "scales", "bias")),
        *((name, c_int64) for name in ("outputs", "inputs", "kind")),
        ("factor", c_double),
    ]


class NormStruct(ctypes.Structure):
    """Mirrors `struct norm`."""

    _fields_: ClassVar = [("weight", c_void_p), ("bias", c_void_p), ("kind", c_int64), ("eps", c_double)]


class LayerStruct(ctypes.Structure):
    """Mirrors `struct layer`."""

    _fields_: ClassVar = [
        *((name, NormStruct) for name in ("attention_norm", "cross_norm", "feed_forward_norm")),
        *((name, NormStruct) for name in ("query_norm", "key_norm", "cross_query_norm")),
        *((name, LinearStruct) for name in ("qkv", "output", "cross_query", "cross_output", "up", "down")),
        *(("keys", c_void_p), ("values", c_void_p)),
        *((name, c_int64) for name in ("has_cross", "pattern", "pattern_size", "pattern_summary")),
    ]


class NetworkStruct(ctypes.Structure):
    """Mirrors `struct network`."""

    _fields_: ClassVar = [
        ("layers", c_void_p),
        *(("embedding", LinearStruct), ("lm_head", LinearStruct)),
        *(("embedding_norm", NormStruct), ("final_norm", NormStruct)),
        *((name, c_void_p) for name in ("positions", "segments", "rope_frequencies")),
        *((name, c_int64) for name in ("num_layers", "dim", "heads", "kv_heads", "head_dim", "ff_dim", "activation")),
        *((name, c_int64) for name in ("pre_norm", "causal", "slots", "max_positions", "kv_bf16")),
        ("embedding_scale", c_double),
    ]


class StepStruct(ctypes.Structure):
    """Mirrors `struct step`."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("ids", "rows", "positions", "slots", "outputs", "table")),
        *((name, c_void_p) for name in ("source_table", "source_lengths", "lengths", "hidden", "logits", "tokens")),
        *((name, c_int64) for name in ("num_tokens", "num_rows", "num_outputs", "table_width", "span", "source_width")),
        *(("workspace", c_void_p), ("workspace_size", c_int64)),
    ]


class AttentionStruct(ctypes.Structure):
    """Mirrors `struct attention`."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("keys", "values", "slots", "queries", "out", "counts", "scores")),
        *((name, c_int64) for name in ("num_queries", "slot_stride", "scores_stride", "head_dim", "kv_bf16")),
    ]


STRUCTS = (LinearStruct, NormStruct, LayerStruct, NetworkStruct, StepStruct, AttentionStruct)
INT, POINTER = c_int64, c_void_p
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "clearhead_step": (POINTER, POINTER, INT, INT),
    "clearhead_step_workspace": (POINTER, POINTER, INT),
    "clearhead_linear": (POINTER, POINTER, INT, POINTER, POINTER, INT, INT),
    "clearhead_linear_workspace": (POINTER, INT),
    "clearhead_embed": (POINTER, INT, POINTER, INT),
    "clearhead_norm": (POINTER, POINTER, INT, INT, INT),
    "clearhead_activate": (INT, POINTER, INT, INT),
    "clearhead_attend": (POINTER, INT),
    "clearhead_argmax": (POINTER, INT, INT),
    "clearhead_top_logprobs": (POINTER, INT, INT, INT, INT, POINTER, POINTER, INT, INT),
    "clearhead_step_abi": (),
}


@cache
def step_library() -> Any | None:
    """Return the compiled library, or None where it is missing or turned off."""
    if os.environ.get("CLEARHEAD_NATIVE") == "0":
        return None
    preferred = f"_step{sysconfig.get_config_var('EXT_SUFFIX')}"  # one built for another Python works as well
    for path in sorted(Path(__file__).parent.glob("_step.*"), key=lambda path: path.name != preferred):
        try:
            lib = ctypes.CDLL(str(path))
            for name, argtypes in FUNCTIONS.items():
                function = getattr(lib, name)
                function.argtypes, function.restype = argtypes, c_int64
        except (OSError, AttributeError) as error:  # built for another system, or from older sources
            log.info("%s: cannot be loaded: %s; reinstall the package to rebuild it", path, error)
            continue
        if lib.clearhead_step_abi() == ABI + 1000 * sum(map(ctypes.sizeof, STRUCTS)):
            return lib
        log.info("%s: built from another version of its sources; reinstall the package to rebuild it", path)
    return None


@cache
def level() -> int:
    """Return the SIMD level: the best of this CPU, or the one that CLEARHEAD_NATIVE names."""
    name = os.environ.get("CLEARHEAD_NATIVE", "")
    return LEVELS.index(name) if name in LEVELS else BEST_LEVEL


def pointer(x: Tensor | None) -> int | None:
    """Return the address of a contiguous CPU tensor."""
    if x is None:
        return None
    assert x.is_contiguous(), "the native step needs contiguous tensors"
    assert x.is_cpu, "the native step needs tensors on the CPU"
    return x.data_ptr()


def check(code: int) -> None:
    """Raise the error of a code that the library returned."""
    if code:
        raise ValueError(ERRORS.get(code, f"native step: error {code}"))


def pad_rows(x: Tensor) -> Tensor:
    """Copy rows (…, D) to fp32, padded with zeros to a multiple of PAD_TO."""
    return torch.nn.functional.pad(x.detach().float(), (0, -x.shape[-1] % PAD_TO)).contiguous()
