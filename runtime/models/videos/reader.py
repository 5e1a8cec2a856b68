"""Reader of videos: the whole preprocessing from encoded bytes to device input."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Final, Protocol

import numpy as np

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.images.cache import content_key
from staged_pool.runtime.models.images.decode import Encoded, ImageLimits
from staged_pool.runtime.models.images.reader import ImageReader
from staged_pool.runtime.models.images.sizes import Size
from staged_pool.runtime.models.videos.decode import Clip, Frame
from staged_pool.runtime.models.videos.limits import Deadline, VideoLimits
from staged_pool.runtime.models.videos.options import VideoOptions, read_options
from staged_pool.runtime.models.videos.settings import VideoSettings
from staged_pool.runtime.payloads import Pixels
from staged_pool.runtime.requests import Video
from staged_pool.runtime.video_frames import split_frames
from staged_pool.stages.errors import InvalidInput

_FRAME: Final = 8
"""Bytes a pixel of a frame that is resized: as RGB, contiguous, and between the two edges."""


class _Source(Protocol):
    """A video whose frames are known, and not decoded yet."""

    @property
    def size(self) -> Size:
        """Height and width of a frame as stored."""

    @property
    def frames(self) -> int:
        """Number of frames."""

    @property
    def rate(self) -> float | None:
        """Frames a second. None: unknown."""

    @property
    def memory(self) -> int:
        """Most bytes that the decoder takes."""

    def read(self, indices: Sequence[int]) -> Iterator[Frame]:
        """Decode frames, in order."""


@dataclass(frozen=True, slots=True)
class _Choice:
    """The frames of a video that the model reads."""

    source: _Source
    indices: list[int]
    rate: float
    """Chosen frames a second."""
    steps: int
    times_s: tuple[float, ...] | None


@dataclass(frozen=True, slots=True)
class Outline:
    """The size of a prepared image or video; see `Pixels`."""

    patches: int | None
    grid: Size | None = None
    """Height and width of an image in patches."""
    times_s: tuple[float, ...] | None = None


class VideoReader:
    """Prepares videos for one model. Thread-safe; a call runs on one core.

    Args:
        settings: Settings of the model's folder.
        config: Limits.
        images: Reader of the folder's images, whose cache and memory hold videos too.
    """

    def __init__(self, settings: VideoSettings, config: EngineConfig, images: ImageReader) -> None:
        self.settings = settings
        self._limits = VideoLimits.of(config)
        self._frame_limits = ImageLimits(config.max_image_bytes, config.max_image_pixels)
        self._images = images

    def read(self, video: Video, scope: Hashable = None, *, max_tokens: int) -> Pixels:
        """Prepare one video.

        Args:
            video: A video whose `source` is bytes.
            scope: Sharing scope: a cache hit needs an equal one.
            max_tokens: Most tokens of the video. It is checked before frames are decoded.

        Raises:
            TooLarge: The video exceeds a limit.
            UnsupportedMedia: The format is not supported.
            UnusableMedia: The video is damaged, or one edge is too long for the other.
            InvalidInput: An option is invalid, or the video has too many tokens.
        """
        data, options = _content(video), self._options(video)
        key = content_key(data, options.arguments)
        return self._images.cached(key, scope, lambda: self._prepare(data, options, max_tokens))

    def outline(self, video: Video) -> Outline:
        """Return the size of the prepared video, without decoding frames. Raises the errors of `read`."""
        options = self._options(video)
        choice = self._choose(_content(video), options)
        patches = self._patches(choice, options.target(len(choice.indices), choice.source.size))
        return Outline(patches, times_s=choice.times_s)

    def _options(self, video: Video) -> VideoOptions:
        return read_options(video.options, self.settings, self._limits.frames)

    def _choose(self, data: bytes, options: VideoOptions) -> _Choice:
        frames = split_frames(data)
        source: _Source
        if frames is None:
            source = Clip(data, self._limits)
            indices = options.choose(source.frames, source.rate)
            rate = (source.rate or options.fps) * len(indices) / source.frames
        else:  # the caller has chosen them, at a rate that `fps` names
            source = _ReadyFrames(data, frames, self._limits, self._frame_limits)
            indices = [*range(source.frames)]
            if options.num_frames is not None:
                indices = options.choose(source.frames, None)
            rate = options.fps * len(indices) / source.frames
        self._limits.check_chosen(len(indices))
        steps = -(-len(indices) // self.settings.step)
        return _Choice(source, indices, rate, steps, options.times(indices, source.rate))

    def _patches(self, choice: _Choice, size: Size) -> int:
        edge = self.settings.patch_size
        return choice.steps * (size[0] // edge) * (size[1] // edge)

    def _prepare(self, data: bytes, options: VideoOptions, max_tokens: int) -> Pixels:
        from staged_pool.runtime.models.videos.patches import cut_patches  # imports torch

        own = self.settings
        choice = self._choose(data, options)
        count, size = len(choice.indices), choice.source.size
        expected = options.target(count, size)
        tokens = self._patches(choice, expected) // own.merge_size**2
        if tokens > max_tokens:
            raise InvalidInput(
                f"The video takes {tokens} tokens, {count} frames of {expected[1]} x {expected[0]} pixels: the model "
                f"reads at most {max_tokens}. Please ask for fewer frames (`num_frames`, `fps`) or smaller ones "
                "(`max_pixels`)."
            )
        made = 3 * own.step * choice.steps * expected[0] * expected[1]
        needed = choice.source.memory + made + _FRAME * size[0] * size[1]
        with self._images.decodes.room(needed):
            frames = choice.source.read(choice.indices)
            first = next(frames)
            # The first frame tells if the video is turned: that swaps its edges, and keeps its tokens.
            target = options.target(count, (first.shape[0], first.shape[1]))
            values = cut_patches(
                chain([first], frames),
                count,
                target,
                step=own.step,
                patch=own.patch_size,
                merge=own.merge_size,
                resample=own.resample,
            )
        edge = own.patch_size
        grid = target[0] // edge, target[1] // edge
        return Pixels(values, grid, steps=choice.steps, step_s=own.step / choice.rate, times_s=choice.times_s)


class _ReadyFrames:
    """Frames that come as images, one file each."""

    def __init__(self, data: bytes, frames: Sequence[bytes], limits: VideoLimits, each: ImageLimits) -> None:
        limits.check_bytes(len(data))
        limits.check_chosen(len(frames))
        self._data = frames
        self._limits = each
        self._deadline = Deadline(limits.decode_s)
        with _naming_frame(0, len(frames)):
            first = Encoded(frames[0], each)
        self.size = first.size
        self.memory = first.memory
        self.frames = len(frames)
        self.rate: float | None = None

    def read(self, indices: Sequence[int]) -> Iterator[Frame]:
        """Decode frames, in order."""
        for index in indices:
            self._deadline.check()
            with _naming_frame(index, self.frames):
                yield np.array(Encoded(self._data[index], self._limits).decode())


@contextmanager
def _naming_frame(index: int, count: int) -> Iterator[None]:
    """Say in errors which frame is meant."""
    try:
        yield
    except InvalidInput as error:
        raise error.with_prefix(f"Frame {index + 1} of {count}: ") from error


def _content(video: Video) -> bytes:
    if not isinstance(video.source, bytes):
        raise TypeError("the video has not been fetched")
    return video.source
