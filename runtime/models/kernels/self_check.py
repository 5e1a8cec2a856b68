"""Comparison of two computations that should give equal results.

Architectures that nobody has looked at are checked at load: a change of the model is kept only if results stay equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from staged_pool.runtime.models.kernels.misuse import MISUSE_ERRORS

TOLERANCE: Final = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
"""The largest accepted `difference`, by dtype.

Rounding stays ten times below it. A sequence that attends to another, or a wrong position, is far above it."""


def difference(found: Tensor, reference: Tensor) -> float:
    """Return the relative difference of rows: the norm of the error over the norm of the deviation from the mean.

    Args:
        found: [rows, values].
        reference: [rows, values].
    """
    found, reference = found.float(), reference.float()
    spread = (reference - reference.mean(dim=0)).norm()
    return float((found - reference).norm() / spread.clamp_min(torch.finfo(torch.float32).tiny))


def keep_if_equal(
    change: Callable[[], Callable[[], None]], compute: Callable[[], Tensor], *, name: str, dtype: torch.dtype
) -> str | None:
    """Change a model, and undo the change if the results differ.

    Args:
        change: Changes the model, and returns a function that undoes it.
        compute: Returns results, [rows, values], for the same inputs each time.
        name: Name of the changed part, for the reason.
        dtype: Data type of the weights.

    Returns:
        The reason why the change was undone. None: it is kept.
    """
    undo: Callable[[], None] | None = None
    try:
        with torch.inference_mode():
            before = compute().float()
            undo = change()
            apart = difference(compute(), before)
    except MISUSE_ERRORS as error:
        reason = f"{name} fails: {error}"
    else:
        if apart <= TOLERANCE[dtype]:
            return None
        reason = f"{name} gives other vectors (relative difference {apart:.2g})"
    if undo is not None:
        undo()
    return reason
