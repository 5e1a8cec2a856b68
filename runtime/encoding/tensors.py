"""Conversions to tensors of torch, which is imported when the first one is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from staged_pool.runtime.payloads import SparseVector

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Tensor", "no_rows", "sparse_rows", "tensor"]


def tensor(values: NDArray[Any]) -> Tensor:
    """Return a tensor that shares the memory of an array."""
    import torch

    return torch.from_numpy(np.ascontiguousarray(values))


def no_rows(*, sparse: bool = False) -> Tensor:
    """Return the tensor of no input at all."""
    import torch

    empty = torch.tensor([])
    return empty.to_sparse() if sparse else empty


def sparse_rows(vectors: Sequence[SparseVector], width: int) -> Tensor:
    """Return a sparse tensor [rows, width]."""
    import torch

    rows = np.repeat(np.arange(len(vectors)), [vector.indices.size for vector in vectors])
    columns = np.concatenate([vector.indices for vector in vectors])
    values = np.concatenate([vector.values for vector in vectors])
    return torch.sparse_coo_tensor(
        torch.from_numpy(np.stack([rows, columns.astype(np.int64)])),
        torch.from_numpy(values),
        (len(vectors), width),
        is_coalesced=True,
        check_invariants=True,  # said, because torch warns where nothing is said
    )
