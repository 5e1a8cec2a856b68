"""Values on the way to the device and back: prepared inputs, and rows of outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from staged_pool.runtime.requests import Output, Outputs
from staged_pool.runtime.spans import Span


@dataclass(frozen=True, slots=True)
class SparseVector:
    """The entries other than 0 of a vector over the vocabulary."""

    indices: NDArray[np.int32]
    """[entries]: token ids, ascending."""
    values: NDArray[np.float32]
    """[entries]: weights of these tokens."""

    @property
    def size(self) -> int:
        """Count of numbers in both arrays."""
        return self.indices.size + self.values.size


Values: TypeAlias = NDArray[np.float32] | SparseVector
"""One `Output` of one input, on the host.

dense [width], or [chunks, width] of a document in chunks, not normalised; multi_vector [kept tokens, width], or
[chunks, width]; labels [labels]; token_labels [tokens, labels]; token_weights [tokens]; or a sparse vector."""


@dataclass(frozen=True, slots=True)
class Pixels:
    """One image or video, ready for the device."""

    values: NDArray[np.uint8] | NDArray[np.float32]
    """[3, height, width], or [patches, patch values] for models that take images of any shape.

    Bytes are normalised on the device; float32 values are normalised already.
    """
    grid: tuple[int, int] | None = None
    """Height and width in patches, for models that take images of any shape."""
    steps: int = 1
    step_s: float | None = None
    """Steps of a video, each with the patches of `grid`, and seconds of a step. None: an image."""
    times_s: tuple[float, ...] | None = None
    """Times of a video's steps in seconds, for a model whose text tells them. The device needs none."""

    @property
    def patches(self) -> int | None:
        """Number of patches in the grid, over all steps; None without a grid."""
        return None if self.grid is None else self.steps * self.grid[0] * self.grid[1]


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """An input of one image without text, ready for the device."""

    pixels: Pixels
    outputs: Outputs
    tokens: int
    """Vectors that the transformer computes for it: its patches and the special tokens of the model."""


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """An input of tokens, ready for the device; it may hold images."""

    ids: list[int]
    """Token ids, at least one."""
    outputs: Outputs
    first_tokens: int | None = None
    """Tokens of the first segment of a pair; the rest is the second segment. None: one segment."""
    prompt_tokens: int = 0
    """Leading tokens that pooling leaves out."""
    unseen_tokens: int = 0
    """Trailing tokens that no token attends to, such as a query's expansion in late interaction."""
    kept: tuple[int, ...] | None = None
    """Indices of the tokens whose vectors multi_vector returns, or whose labels are those of steps. None: all."""
    spans: tuple[Span, ...] | None = None
    """The span of each token, for token_labels, or because the request wants offsets."""
    images: tuple[Pixels, ...] = ()
    """Images whose vectors replace the image tokens in `ids`, in order."""
    looked_up: bool = False
    """True: sparse weights of its tokens are looked up in a table, and the transformer does not read it."""
    chunks: tuple[int, ...] | None = None
    """Tokens of each chunk, which sum to those in `ids`; each gets a vector of the only output. None: no chunks."""
    adapter: str | None = None
    """Adapter of the forward, the same for a whole batch. None: the base model."""

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self.ids)


Payload: TypeAlias = TokenSequence | PreparedImage
"""An input that is ready for the device. A batch has payloads of one kind; their batch keys see to that."""


@dataclass(frozen=True, slots=True)
class Row:
    """The outputs of the device for one input."""

    values: Mapping[Output, Values]
    payload: Payload

    @property
    def numbers(self) -> int:
        """Count of numbers in all outputs."""
        return sum([value.size for value in self.values.values()])


class ModelRow(Protocol):
    """Result of a forward for one payload, as the engine sees it."""

    @property
    def numbers(self) -> int:
        """Count of numbers in it, of 4 bytes each, for the memory of answers."""
