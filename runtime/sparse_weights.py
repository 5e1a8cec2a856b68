"""Operations on sparse vectors, for heads of models and for calls that shape their results."""

from __future__ import annotations

import numpy as np

from staged_pool.runtime.payloads import SparseVector


def largest_weights(vector: SparseVector, count: int | None) -> SparseVector:
    """Keep the entries with the largest weights.

    Args:
        vector: Not changed.
        count: Number of entries. None: all.
    """
    if count is None or len(vector.values) <= count:
        return vector
    kept = np.sort(np.argsort(-np.abs(vector.values), kind="stable")[:count])
    return SparseVector(vector.indices[kept], vector.values[kept])
