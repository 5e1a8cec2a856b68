"""What every head is: token vectors of a batch in, one value for each sequence out, once the device has made it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from staged_pool.runtime.model import Values
from staged_pool.runtime.models.kernels.transfer import Later
from staged_pool.runtime.models.transformer.packing import PackedBatch


class Head(Protocol):
    """Makes one output of a model. Called on the device's thread, in inference mode."""

    def __call__(self, hidden: Tensor, batch: PackedBatch) -> Later[Sequence[Values]]:
        """Begin to make this output of each sequence; what is returned gives them, on the host.

        Args:
            hidden: [tokens, width], in the dtype of the weights: the last layer's token vectors.
            batch: Where each sequence lies, and what is known of it.
        """
        ...

    def parameters(self) -> int:
        """How many the head has of its own."""
        ...
