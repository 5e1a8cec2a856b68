"""Interface of towers: forwards of one lane."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from staged_pool.runtime.models.kernels.transfer import Later
from staged_pool.runtime.payloads import Payload, Values
from staged_pool.runtime.requests import Output


class Tower(Protocol):
    """A transformer and its heads, for the prepared inputs of one lane. Thread-safe.

    A text model has one tower, an image model another; CLIP has both. The towers of a vision language model share one
    transformer.
    """

    @property
    def architecture(self) -> str:
        """Class of the transformer, such as `BertModel`."""
        ...

    @property
    def outputs(self) -> tuple[Output, ...]:
        """Outputs that a forward can compute."""
        ...

    @property
    def width(self) -> int:
        """Values of a dense vector; 0 where there is none."""
        ...

    @property
    def max_tokens(self) -> int:
        """Longest input, in tokens."""
        ...

    @property
    def parameters(self) -> int:
        """Number of weights, heads included."""
        ...

    @property
    def pads(self) -> bool:
        """True: a batch has the tokens of its longest input times its items. False: the sum of its tokens."""
        ...

    def launch(self, payloads: Sequence[Payload]) -> Mapping[Output, Later[Sequence[Values]]]:
        """Start one batch, in inference mode, with the current number of torch threads.

        Args:
            payloads: At least one, all of one batch key.

        Returns:
            For each requested output a function that waits for it and returns its value for each payload. On the CPU
            the forward has already ended.
        """
        ...

    def sample_batch(self, sizes: Sequence[int]) -> Sequence[Payload]:
        """Make a test batch for all outputs, with inputs of about these numbers of tokens."""
        ...
