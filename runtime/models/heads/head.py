"""What every head is: token vectors of a batch in, one value for each sequence out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from staged_pool.runtime.model import Values
from staged_pool.runtime.models.packing import PackedBatch


class Head(Protocol):
    """Makes one output of a model. Called on the device's thread, in inference mode."""

    def __call__(self, hidden: Tensor, batch: PackedBatch) -> Sequence[Values]:
        """What this output is for each sequence, on the host.

        Args:
            hidden: [tokens, width], in the dtype of the weights: the last layer's token vectors.
            batch: Where each sequence lies, and what is known of it.
        """
        ...

    def parameters(self) -> int:
        """How many the head has of its own."""
        ...


def on_host(rows: Tensor) -> NDArray[np.float32]:
    """A tensor of the device as contiguous float32 on the host: one copy."""
    return np.ascontiguousarray(rows.float().cpu().numpy())
