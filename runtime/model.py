"""What the engine asks of a model: plain functions, and a card that says what was understood of its folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from staged_pool.stages.errors import InvalidInput, ModelFailed
from staged_pool.stages.work import Prepared, TextInput

TokenIds: TypeAlias = list[int]
Row: TypeAlias = NDArray[np.float32]
"""The pooled output of one input: [width], float32, on the host, not yet normalised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What was understood of a model folder and how it runs. Shown at start, in `/ready` and in `/v1/models`."""

    name: str
    """The served name."""
    architecture: str
    """Class of the transformer, such as `BertModel`."""
    parameters: int
    width: int
    """Values of one output vector."""
    max_tokens: int
    """Longest input, special tokens included."""
    vocabulary: int
    """Token ids run from 0 to one less."""
    pooling: str
    """How token vectors become one vector, such as `mean`, or `cls+max` where several are concatenated."""
    normalize: bool
    """Whether vectors are brought to length 1."""
    dtype: str
    device: str
    attention: str
    """`packed` or `padded`."""
    torch_threads: int
    """Of all forwards together."""
    forward_workers: int
    """Forwards at once. One that has the device to itself uses all threads, else each has its share of them."""
    load_s: float
    """Seconds from the first byte read to the end of the warm-up."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """One tokenized text."""

    ids: TokenIds
    strings: list[str]
    """What each id stands for, in the tokenizer's own spelling."""


class Model(Protocol):
    """A loaded model. `preprocess` and `tokenize` may run in several threads at once, `forward` in
    `card.forward_workers`."""

    @property
    def card(self) -> ModelCard: ...

    @property
    def pads(self) -> bool:
        """Whether a batch costs its longest input times its items, rather than the sum of its tokens."""
        ...

    def preprocess(self, inputs: Sequence[TextInput]) -> Sequence[Prepared[TokenIds] | InvalidInput]:
        """Turn each input into token ids, or say what is wrong with it. Order and number are kept."""
        ...

    def forward(self, payloads: Sequence[TokenIds], at_once: int = 1, /) -> Sequence[Row | ModelFailed]:
        """Run one batch. A row that holds NaN or Inf is returned as `ModelFailed`; the others stand.

        Args:
            payloads: At least one.
            at_once: How many forwards are to share the device: 1 if this one has it to itself.

        Raises:
            OutOfMemory: The device has no room for this batch.
            DeviceLost: The device can no longer be trusted.
        """
        ...

    def tokenize(self, text: str, *, add_special_tokens: bool) -> Tokens: ...
