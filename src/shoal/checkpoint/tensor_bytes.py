"""A tensor as plain bytes, without a copy if it is contiguous in host memory."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPE_CODES: dict[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""safetensors' code for every dtype that can be saved."""

DTYPES: dict[str, torch.dtype] = {code: dtype for dtype, code in DTYPE_CODES.items()}


def unsaveable_reason(tensor: Tensor) -> str:
    """Why a tensor cannot be saved as plain bytes; '' if it can."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        return "a sparse, quantised or meta tensor"
    return "" if tensor.dtype in DTYPE_CODES else f"a tensor of dtype {tensor.dtype}"


def bytes_of(tensor: Tensor) -> memoryview:
    """The values in row-major order. For a contiguous tensor on the host this is its own memory."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # Not reshape: a tensor of one element is contiguous with any stride, and reshape would keep that stride.
    flat = plain.as_strided((plain.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data
