"""Whether two ways of computing the same thing agree: what is not known of an architecture is found out by trying."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

MISFITS: Final = (RuntimeError, TypeError, ValueError, LookupError, AttributeError)
"""What code of transformers raises where it is used in a way that it was not written for."""

TOLERANCE: Final = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
"""How far results may differ, as `difference` has it. Rounding stays ten times below; a sequence that sees another
one's tokens, or a wrong position, ends far above."""


def difference(found: Tensor, reference: Tensor) -> float:
    """How far rows are from what they should be, relative to how far those are from their average.

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
    """Change a model, unless it then computes something else.

    Args:
        change: Gives back what undoes it.
        compute: [rows, values], of inputs that are always the same.
        name: What is changed.
        dtype: Of its weights.

    Returns:
        Why it was not changed; None where it was.
    """
    undo: Callable[[], None] | None = None
    try:
        with torch.inference_mode():
            before = compute().float()
            undo = change()
            apart = difference(compute(), before)
    except MISFITS as error:
        reason = f"{name} does not run on them: {error}"
    else:
        if apart <= TOLERANCE[dtype]:
            return None
        reason = f"{name} gives other vectors (relative difference {apart:.2g})"
    if undo is not None:
        undo()
    return reason
