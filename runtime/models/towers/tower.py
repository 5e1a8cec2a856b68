"""What every tower of a model is: a way in for the inputs of a lane, and all that is made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

from staged_pool.runtime.model import ModelInput, Payload, Values
from staged_pool.runtime.models.kernels.transfer import Later
from staged_pool.runtime.requests import Output
from staged_pool.stages.errors import InvalidInput
from staged_pool.stages.work import Prepared

Outcome: TypeAlias = Prepared[Payload] | tuple[Prepared[Payload], ...] | InvalidInput
"""What an input becomes: a payload, several of them, or what is wrong with it."""


class Tower(Protocol):
    """FileReads inputs, and runs them through a transformer and its heads.

    A model of texts has one, and so has one of images; CLIP has both. A language model that sees has one for both
    lanes. Every method may run in several threads at once.
    """

    @property
    def architecture(self) -> str:
        """Class of the transformer, such as `BertModel`."""
        ...

    @property
    def outputs(self) -> tuple[Output, ...]:
        """What a forward can give."""
        ...

    @property
    def width(self) -> int:
        """Values of a dense vector; 0 where there is none."""
        ...

    @property
    def max_tokens(self) -> int:
        """Of the longest input."""
        ...

    @property
    def parameters(self) -> int:
        """How many it has, with those of its heads."""
        ...

    @property
    def pads(self) -> bool:
        """Whether a batch costs its longest input times its items, rather than the sum of its tokens."""
        ...

    def preprocess(self, inputs: Sequence[ModelInput]) -> Sequence[Outcome]:
        """Turn each input into what `compute` reads. Order and number are kept; payloads that do not fit in one batch
        have different batch keys."""
        ...

    def launch(self, payloads: Sequence[Payload]) -> Mapping[Output, Later[Sequence[Values]]]:
        """Begin to run one batch, in inference mode, on as many threads as are set. On the CPU it has ended then.

        Args:
            payloads: At least one, all of one batch key.

        Returns:
            For each output that they ask for, what waits for it and gives what it is for each of them.
        """
        ...

    def made_up(self, sizes: Sequence[int]) -> Sequence[Payload]:
        """A batch to try the tower with, for all that it gives: inputs of so many tokens each, or as near as may be."""
        ...
