"""Video options of a request, and their limits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from staged_pool.runtime.models.images.sizes import PixelRange, Size
from staged_pool.runtime.models.videos.sampling import qwen2_frames, qwen3_frames, qwen3_step_times
from staged_pool.runtime.models.videos.settings import VideoSettings
from staged_pool.runtime.models.videos.sizes import qwen2_size, qwen3_size
from staged_pool.stages.errors import InvalidSetting, shortened

PARAM: Final = "media_io_kwargs"
"""Name of the video options in requests."""

ALL: Final = -1
"""Value of `num_frames`: every frame. As `fps`, it is no limit; `num_frames` decides alone."""

_KNOWN: Final = (
    "num_frames", "fps", "max_duration", "min_frames", "max_frames", "do_sample_frames", "min_pixels", "max_pixels",
    "size",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoOptions:
    """Choice of the frames of one video, and their size."""

    settings: VideoSettings
    num_frames: int | None
    """Frames to choose. `ALL`: every frame. None: `fps` decides."""
    fps: float
    by_both: bool = False
    """The fewer frames of `num_frames` and `fps` are chosen, as by vLLM."""
    max_duration_s: float | None
    """Seconds of video that `fps` counts at most: a longer video has its frames further apart."""

    @property
    def arguments(self) -> Mapping[str, object]:
        """All that frames and sizes depend on, for the key of a cache."""
        resize, own = self.settings.resize, self.settings
        return {
            "video": [resize.min_pixels, resize.max_pixels, own.min_frames, own.max_frames],
            "frames": [self.num_frames, self.fps, self.max_duration_s, self.by_both],
        }

    def choose(self, total: int, rate: float | None) -> list[int]:
        """Choose frames, by their indices in the order of time.

        Args:
            total: Frames of the video.
            rate: Its frames a second. None: unknown, so that its length is unknown too.
        """
        own = self.settings
        if self.num_frames == ALL:
            return [*range(total)]
        if self.by_both and self.num_frames is not None:
            found = replace(self, num_frames=None).choose(total, rate)
            return found if len(found) <= self.num_frames else replace(self, by_both=False).choose(total, rate)
        if self.num_frames is not None and own.rule == "qwen3":
            return qwen3_frames(total, rate, num_frames=self.num_frames)
        if self.num_frames is not None:
            return qwen2_frames(total, rate or self.fps, num_frames=self.num_frames, step=own.step)
        most = own.max_frames
        if self.max_duration_s is not None:
            most = min(most, max(math.floor(self.max_duration_s * self.fps), own.step))
        least, rate = own.min_frames, rate or self.fps
        if own.rule == "qwen3":
            return qwen3_frames(total, rate, fps=self.fps, min_frames=min(least, most), max_frames=most)
        return qwen2_frames(total, rate, fps=self.fps, step=own.step, min_frames=least, max_frames=most)

    def times(self, indices: list[int], rate: float | None) -> tuple[float, ...] | None:
        """Return the time of each step in seconds. None: the model is told none.

        Args:
            indices: The chosen frames.
            rate: Frames a second of the video. None: unknown, so ready frames come at `fps`.
        """
        if self.settings.rule == "qwen2":
            return None
        return tuple(qwen3_step_times(indices, rate or self.fps, step=self.settings.step))

    def target(self, count: int, size: Size) -> Size:
        """Return the height and width that each of a number of frames is resized to.

        Raises:
            UnusableMedia: One edge is too long for the other.
        """
        own = self.settings
        size_of = qwen3_size if own.rule == "qwen3" else qwen2_size
        return size_of(count, size, own.resize, step=own.step, max_video_tokens=own.max_video_tokens)


def read_options(options: Mapping[str, object], settings: VideoSettings, max_frames: int) -> VideoOptions:
    """Check the options of a video, and combine them with the folder's settings.

    The names are those of vLLM and of transformers' video processors. More pixels than the folder's are rejected.

    Args:
        options: Options of the request.
        settings: Settings of the folder.
        max_frames: Most frames that the server reads of one video.

    Raises:
        InvalidSetting: An option is unknown to this model, or its value is invalid; names it.
    """
    for name in options:
        if name not in _KNOWN:
            raise _invalid(f"The video option {shortened(name)!r} is not known: this model knows {', '.join(_KNOWN)}.")
    number = _count(options, max_frames)
    rate = options.get("fps")
    if rate == ALL and not isinstance(rate, bool):
        if number is None:
            raise _invalid("The video option fps is -1, which chooses nothing: give num_frames, too; -1 takes all.")
        options = {**options, "fps": None}
    fps = _number(options, "fps")
    if number == ALL and fps is not None and options.get("do_sample_frames") is not False:
        number = None
    if number is None and fps is None:
        number = settings.num_frames
    most = min(settings.max_frames, max_frames)
    most = _whole(options, "max_frames", most) or most
    least = _whole(options, "min_frames", most) or min(settings.min_frames, most)
    return VideoOptions(
        settings=replace(settings, resize=_resize(options, settings.resize), min_frames=least, max_frames=most),
        num_frames=number,
        fps=settings.fps if fps is None else fps,
        by_both=number is not None and fps is not None,
        max_duration_s=_number(options, "max_duration"),
    )


def _count(options: Mapping[str, object], most: int) -> int | None:
    """Return the wanted number of frames; `ALL` if every frame is wanted."""
    sampled = options.get("do_sample_frames")
    if sampled is not None and not isinstance(sampled, bool):
        raise _invalid("The video option do_sample_frames must be true or false.")
    if sampled is False or options.get("num_frames") == ALL:
        return ALL
    return _whole(options, "num_frames", most)


def _resize(options: Mapping[str, object], folder: PixelRange) -> PixelRange:
    size = options.get("size", {})
    if not isinstance(size, Mapping) or not size.keys() <= {"shortest_edge", "longest_edge"}:
        raise _invalid("The video option size must be an object with shortest_edge and longest_edge.")
    given = {**{"min_pixels": size.get("shortest_edge"), "max_pixels": size.get("longest_edge")}, **options}
    high = _whole(given, "max_pixels", folder.max_pixels) or folder.max_pixels
    low = _whole(given, "min_pixels", high) or min(folder.min_pixels, high)
    return replace(folder, min_pixels=low, max_pixels=high)


def _whole(options: Mapping[str, object], name: str, most: int) -> int | None:
    value = options.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise _invalid(f"The video option {name} must be a whole number from 1 to {most}.")
    return value


def _number(options: Mapping[str, object], name: str) -> float | None:
    value = options.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise _invalid(f"The video option {name} must be a number above 0.")
    return float(value)


def _invalid(message: str) -> InvalidSetting:
    return InvalidSetting(message, param=PARAM)
