"""Interface of heads: from the token vectors of a batch to one output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from staged_pool.runtime.models.kernels.transfer import Later
from staged_pool.runtime.models.transformer.packing import PackedBatch
from staged_pool.runtime.payloads import Values


class Head(Protocol):
    """Head that computes one output of a model. Called on a device thread, in inference mode."""

    def __call__(self, hidden: Tensor, batch: PackedBatch) -> Later[Sequence[Values]]:
        """Start to compute the output.

        Args:
            hidden: [tokens, width], in the dtype of the weights: token vectors of the last layer.
            batch: The sequences of the batch.

        Returns:
            A function that waits for the output and returns its value for each sequence, on the host.
        """
        ...

    def parameters(self) -> int:
        """Return the number of weights of the head."""
        ...
