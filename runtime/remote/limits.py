"""Limits of the numbers in payloads and rows of another process.

They are checked before a loop, an allocation or a kernel takes the numbers. Payloads are compared with those that
preprocess of the model can make, and rows with those that its forward can give. Kernels do not compare: they would read
the memory behind an array.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from operator import lt
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from staged_pool.runtime.card import Lane, ModelCard
from staged_pool.runtime.models.images.scale import Layout
from staged_pool.runtime.models.images.sizes import Size
from staged_pool.runtime.models.preparation import ImagePreparation, Preparation
from staged_pool.runtime.models.tokenizing.lone_images import ImageTokens
from staged_pool.runtime.models.vision.image_layout import ImageLayout
from staged_pool.runtime.payloads import Payload, Pixels, PreparedImage, SparseVector, TokenSequence, Values
from staged_pool.runtime.requests import Output, Outputs
from staged_pool.stages.wire import WireError

_LOOKED_UP: Outputs = frozenset({Output.SPARSE})

_Shape: TypeAlias = tuple[int | None, ...]
"""Sizes of an array. None: any size."""


def require(is_right: bool, field: str, problem: str) -> None:
    """Check a number of another process.

    Args:
        is_right: Whether it is as it must be.
        field: Name of the field that has it.
        problem: The words behind the name.

    Raises:
        WireError: It is not.
    """
    if not is_right:
        raise WireError(f"the peer sends a wrong number: `{field}` {problem}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelLimits:
    """Limits of the images and videos of one model."""

    layout: Layout
    size: Size | None
    """Height and width of every image. None: they differ."""
    edge: int | None
    """Edge of a patch or tile in pixels. None: images have neither, or it is unknown."""
    frames: int
    """Frames of a patch of a video."""
    merge: int
    """Patches along one edge that become one token: grids are multiples of it."""
    patches: int | None
    """Most patches of an image. None: its tokens are the limit."""

    @classmethod
    def of(cls, image: ImagePreparation) -> PixelLimits:
        """Derive the limits from the settings of a model's images."""
        settings, embedded = image.settings(), image.embedded
        return cls(
            layout=settings.scale.layout,
            size=settings.shape,
            edge=settings.patch_size,
            frames=settings.scale.repeats,
            merge=1 if embedded is None else embedded[1].merge or 1,
            patches=settings.max_patches if embedded is None else None,
        )

    def check(self, pixels: Pixels) -> None:
        """Check the shape of an image or video against its grid and the model.

        Raises:
            WireError: It is another one.
        """
        shape, grid = pixels.values.shape, pixels.grid
        require(all(shape), "values", "has no pixels")
        require(pixels.steps == 1 or pixels.step_s is not None, "steps", "has steps of an image")
        if self.layout == "planes":
            require(grid is None and pixels.step_s is None, "grid", "is set for an image without patches")
            require(_fits(shape, (3, *(self.size or (None, None)))), "values", "has another shape than the images")
        elif self.layout == "tiles":
            require(pixels.step_s is None, "step_s", "is set for an image of tiles")
            tiles = 1 if pixels.patches in (None, 1) else (pixels.patches or 0) + 1
            require(_fits(shape, (tiles, 3, self.edge, self.edge)), "values", "has another shape than its tiles")
        else:
            self._check_patches(pixels)

    def _check_patches(self, pixels: Pixels) -> None:
        grid, patches = pixels.grid or (0, 0), pixels.patches or 0
        require(patches > 0 and not any(edge % self.merge for edge in grid), "grid", "is no grid of patches")
        require(self.patches is None or patches <= self.patches, "grid", "has more patches than the model takes")
        shape, frames = pixels.values.shape, 1 if pixels.step_s is None else self.frames
        # A processor that is not ours may give patches as pixels.
        is_right = shape[0] == patches if self.edge is None else shape == (patches, 3 * self.edge**2 * frames)
        require(is_right, "values", "has another shape than its grid")


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadLimits:
    """Limits of the payloads of one lane of a model."""

    lane: Lane
    outputs: Outputs
    max_tokens: int
    token_ids: int
    """Ids are below it."""
    adapters: frozenset[str | None]
    pixels: PixelLimits | None = None
    """None: the lane has no images, or the model has a preprocess of its own."""
    lone: ImageTokens | None = None
    """Rule for the tokens of an image without text. None: see `pixels`."""
    layout: ImageLayout | None = None
    """Image tokens among those of texts. None: images come without texts."""

    @classmethod
    def of(cls, lane: Lane, card: ModelCard, preparation: Preparation | None) -> PayloadLimits:
        """Derive the limits of a lane from what fronts prepare its inputs by."""
        text = None if preparation is None else preparation.text
        empty = None if text is None else text.settings.empty_id
        image = None if preparation is None or lane != "image" else preparation.image
        return cls(
            lane=lane,
            outputs=frozenset(card.outputs),
            max_tokens=card.max_tokens,
            token_ids=max(card.vocabulary, 0 if empty is None else empty + 1),
            adapters=frozenset((None, *card.adapters.values())),
            pixels=None if image is None else PixelLimits.of(image),
            lone=None if image is None else image.lone,
            layout=None if image is None or image.embedded is None else image.embedded[1],
        )

    def batch_key(self, payload: Payload) -> Hashable:
        """Return the property that payloads share which one forward may take."""
        if isinstance(payload, TokenSequence):
            return payload.outputs, payload.adapter
        is_one_shape = self.pixels is not None and self.pixels.layout == "planes"
        return payload.outputs, payload.pixels.values.shape if is_one_shape else None

    def check_count(self, tokens: int) -> None:
        """Check the number of tokens of a sequence, before its ids are read.

        Raises:
            WireError: The lane has no sequences, or none of this length.
        """
        has_sequences = self.lane == "text" or self.layout is not None
        require(has_sequences and 0 < tokens <= self.max_tokens, "ids", "is no number of tokens that the model takes")

    def check_ids(self, ids: NDArray[np.int32]) -> None:
        """Check that token ids are in the vocabulary; those of images and videos need not be.

        Raises:
            WireError: One is not.
        """
        if ids.view(np.uint32).max() < self.token_ids:  # an id below 0 is one of the largest
            return
        wrong = ids.view(np.uint32) >= self.token_ids
        if self.layout is not None:
            wrong &= (ids != self.layout.image_token) & (ids != self.layout.video_token)
        require(not wrong.any(), "ids", "has an id that is not in the vocabulary")

    def check(self, payload: Payload) -> None:
        """Check all other numbers of a payload.

        Raises:
            WireError: The preprocess stage of the model makes no such payload.
        """
        require(bool(payload.outputs) and payload.outputs <= self.outputs, "outputs", "has one of another model")
        if isinstance(payload, PreparedImage):
            self._check_image(payload)
        else:
            self._check_sequence(payload)

    def _check_image(self, image: PreparedImage) -> None:
        require(self.lane == "image" and self.layout is None, "pixels", "is an image in a lane without such")
        if self.pixels is not None:
            self.pixels.check(image.pixels)
        right = 0 < image.tokens <= image.pixels.values.size if self.lone is None else self.lone.of(image.pixels)
        require(right is True or right == image.tokens, "tokens", "is not the number of tokens of the image")

    def _check_sequence(self, sequence: TokenSequence) -> None:
        tokens, first, kept, chunks = len(sequence.ids), sequence.first_tokens, sequence.kept, sequence.chunks
        require(first is None or first <= tokens, "first_tokens", "is more than the tokens")
        require(sequence.unseen_tokens < tokens, "unseen_tokens", "are all tokens")
        if kept:
            is_ascending = all(map(lt, kept, kept[1:]))
            require(is_ascending and kept[0] >= 0 and kept[-1] < tokens, "kept", "are no places of tokens, in order")
        if chunks is not None:
            require(min(chunks, default=0) > 0, "chunks", "has a chunk without tokens")
            require(sum(chunks) == tokens, "chunks", "does not sum to the tokens")
            require(kept is None, "chunks", "goes with a choice of tokens")
        require(not sequence.looked_up or sequence.outputs == _LOOKED_UP, "looked_up", "goes with other outputs")
        require(sequence.adapter in self.adapters, "adapter", "is one of another model")
        require(bool(sequence.images) == (self.layout is not None), "images", "is of another lane")
        if self.layout is not None and self.pixels is not None:
            for pixels in sequence.images:
                self.pixels.check(pixels)
            media = {self.layout.image_token, self.layout.video_token}
            places = sum(sequence.ids.count(token) for token in media if token is not None)
            wanted = sum(self.layout.tokens_of(pixels.patches) for pixels in sequence.images)
            require(places == wanted, "images", "does not have the tokens of its images")


@dataclass(frozen=True, slots=True)
class RowLimits:
    """Limits of the rows of one model."""

    card: ModelCard

    def check(self, values: Mapping[Output, Values], payload: Payload) -> None:
        """Check the outputs of a row, and their shapes, against its payload.

        Raises:
            WireError: The forward of the model gives no such row.
        """
        require(values.keys() == payload.outputs, "rows", "has other outputs than were asked for")
        for output, each in values.items():
            is_sparse = isinstance(each, SparseVector)
            require(is_sparse == (output is Output.SPARSE), "rows", f"has no values of {output}")
            if isinstance(each, SparseVector):
                _check_entries(each.indices)
            else:
                require(self._may_have(output, each, payload), "rows", f"has {output} of a wrong shape")

    def _may_have(self, output: Output, values: NDArray[Any], payload: Payload) -> bool:
        labels = len(self.card.labels) or None
        if isinstance(payload, PreparedImage):
            return _fits(values.shape, {Output.LABELS: (labels,), Output.DENSE: (None,)}.get(output, (None, None)))
        kept = len(payload.ids) if payload.kept is None else len(payload.kept)
        match output:
            case Output.DENSE if payload.chunks is not None:
                return _fits(values.shape, (len(payload.chunks), self.card.width))
            case Output.DENSE:
                return _fits(values.shape, (self.card.width,))
            case Output.MULTI_VECTOR:
                rows = kept if payload.chunks is None else len(payload.chunks)
                return _fits(values.shape, (rows, self.card.token_width or None))
            case Output.LABELS:
                return _fits(values.shape, (labels,))
            case Output.TOKEN_LABELS:
                return _fits(values.shape, (kept if self.card.labels_steps else len(payload.ids), labels))
            case _:  # weights of tokens, without the special ones at the ends
                return 0 < values.ndim <= 2 and len(values) <= len(payload.ids)


def _check_entries(indices: NDArray[np.int32]) -> None:
    """Check the indices of a sparse vector. Logits may have more entries than the tokenizer has tokens."""
    is_ascending = bool((indices[1:] > indices[:-1]).all())
    require(is_ascending and (not len(indices) or indices[0] >= 0), "entries", "are no indices, in order")


def _fits(shape: tuple[int, ...], wanted: _Shape) -> bool:
    return len(shape) == len(wanted) and all(
        size is None or size == own for own, size in zip(shape, wanted, strict=True)
    )
