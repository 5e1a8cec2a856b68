"""Dtypes of weights that oneDNN can lay out for itself."""

from __future__ import annotations

from typing import Final

import pytest
import torch

from staged_pool.runtime.models.linear import prepacked


def _why_not(dtype: torch.dtype) -> str | None:
    try:
        prepacked(torch.zeros(16, 16, dtype=dtype))
    except RuntimeError as error:
        return str(error)
    return None


PREPACKED: Final = [
    pytest.param(dtype, marks=[pytest.mark.skip(reason=reason)] if (reason := _why_not(dtype)) else [])
    for dtype in (torch.float32, torch.bfloat16)
]
"""For `parametrize`; float32 has kernels on every processor, bfloat16 only where there is AVX-512 or the like."""
