"""Rows as they cross from one stage to the next: raw little-endian bytes and tensors.

Legend: R rows, K channels.
"""

import numpy as np
import torch
from torch import Tensor

from subnet.inference.served import DType


def encode_rows(rows_RK: Tensor) -> tuple[DType, bytes]:
    """Type and bytes of (R, K) float32 or bfloat16."""
    if rows_RK.dtype is torch.bfloat16:
        return "bfloat16", rows_RK.contiguous().view(torch.int16).numpy().astype("<i2", copy=False).tobytes()
    return "float32", rows_RK.to(torch.float32).contiguous().numpy().astype("<f4", copy=False).tobytes()


def decode_rows(data: bytes, dtype: DType, width: int) -> Tensor:
    """(R, K) of the type that was sent; the size has been checked (messages.check_payload)."""
    if dtype == "bfloat16":
        bits = torch.from_numpy(np.frombuffer(data, dtype="<i2").astype(np.int16))
        return bits.view(torch.bfloat16).view(-1, width)
    return torch.from_numpy(np.frombuffer(data, dtype="<f4").astype(np.float32)).view(-1, width)
