"""CUDA graphs of image encoders: forwards recorded once for a few numbers of images; see `transformer.cuda_graphs`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from torch import Tensor

from staged_pool.runtime.models.transformer.cuda_graphs import Recorder

COUNTS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Recorded numbers of images. A batch between two of them computes at most half as many images too many."""


class ImageValues(NamedTuple):
    """Values that a model computes of images of one shape."""

    hidden: Tensor | None
    """[images, vectors, width]. None: it computes labels."""
    own: Tensor | None
    """[images, width]: the vector or logits of each image from the model's own class. None: it computes neither."""

    def first(self, count: int) -> ImageValues:
        """Return the values of the first images."""
        hidden, own = (None if values is None else values[:count] for values in self)
        return ImageValues(hidden, own)


@dataclass(frozen=True, slots=True, eq=False)
class _Recording:
    pixels: Tensor
    """[images, ...]: the input, which a batch is copied into."""
    values: ImageValues
    """The next replay overwrites them."""
    replay: Callable[[], object]


class ImageGraphs:
    """Recorded forwards of one image encoder. Not thread-safe.

    Args:
        run: Its forward, from pixels, [images, ...].
        recorder: See `Recorder`.
    """

    def __init__(self, run: Callable[[Tensor], ImageValues], recorder: Recorder[ImageValues]) -> None:
        self._run = run
        self._recorder = recorder
        self._recordings: dict[int, _Recording] = {}

    @property
    def counts(self) -> Sequence[int]:
        """Numbers of images that are recorded, from small to large."""
        return tuple(self._recordings)

    def record(self, pixels: Tensor) -> None:
        """Record a forward of images of this number and shape.

        Args:
            pixels: [images, ...], kept as the input of the recording.

        Raises:
            RuntimeError: The forward cannot be recorded, for example because it waits for the device.
        """
        replay, values = self._recorder(lambda: self._run(pixels))
        self._recordings[len(pixels)] = _Recording(pixels, values, replay)
        self._recordings = dict(sorted(self._recordings.items()))

    def forget(self, count: int) -> None:
        """Drop the recording of a number of images, if there is one."""
        self._recordings.pop(count, None)

    def values(self, pixels: Tensor) -> ImageValues | None:
        """Replay a forward; None if no recording holds the batch.

        The next batch overwrites the values.
        """
        count = next((count for count in self._recordings if count >= len(pixels)), None)
        if count is None or self._recordings[count].pixels.shape[1:] != pixels.shape[1:]:
            return None
        recording = self._recordings[count]
        recording.pixels[: len(pixels)].copy_(pixels)  # images of an earlier batch may remain behind this one
        recording.replay()
        return recording.values.first(len(pixels))
