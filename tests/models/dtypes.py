"""Dtypes of weights for which this processor has kernels."""

from __future__ import annotations

from typing import Final, get_args

import pytest
import torch

from staged_pool.runtime.models.devices.kernel_choices import capabilities
from staged_pool.runtime.models.kernels.linear import Product, prepacked
from staged_pool.runtime.models.quantizing.int8 import why_no_int8


def _why_not(dtype: torch.dtype) -> str | None:
    try:
        prepacked(torch.zeros(16, 16, dtype=dtype))
    except RuntimeError as error:
        return str(error)
    return None


def _marks(dtype: torch.dtype) -> list[pytest.MarkDecorator]:
    reason = _why_not(dtype)
    return [pytest.mark.skip(reason=reason)] if reason else []


_DTYPES: Final = (torch.float32, torch.bfloat16)

PREPACKED: Final = [pytest.param(dtype, marks=_marks(dtype)) for dtype in _DTYPES]
"""For `parametrize`: dtypes that oneDNN can lay out for itself. float32 has kernels on every processor, bfloat16 only
where there is AVX-512 or the like."""

MULTIPLIED: Final = [
    pytest.param(product, dtype, marks=[] if product == "plain" else _marks(dtype))
    for product in get_args(Product)
    for dtype in _DTYPES
]
"""For `parametrize`: how fused layers multiply, and the dtype of their weights."""

_WHY_NO_INT8: Final = why_no_int8(capabilities())

needs_int8: Final = pytest.mark.skipif(_WHY_NO_INT8 is not None, reason=str(_WHY_NO_INT8))
