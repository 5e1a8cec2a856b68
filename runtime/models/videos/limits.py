"""Limits of one video, which are checked before it is decoded, and while it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from staged_pool.runtime.config import EngineConfig
from staged_pool.stages.errors import TooLarge

MAX_STREAMS: Final = 8
"""Streams of a file that are looked at. Others, such as further languages, are ignored."""

MAX_RATE: Final = 250
"""Frames a second that a video may have on average, over `VideoLimits.seconds`. High-speed cameras write 240."""


@dataclass(frozen=True, slots=True)
class VideoLimits:
    """Limits of one video."""

    file_bytes: int
    pixels: int
    """Pixels of one frame."""
    seconds: float
    """Seconds from the first frame to the last."""
    frames: int
    """Frames that are chosen for the model."""
    decode_s: float
    """Seconds that decoding may take."""

    @classmethod
    def of(cls, config: EngineConfig) -> VideoLimits:
        """Return the limits of an engine."""
        return cls(
            file_bytes=config.max_video_bytes,
            pixels=config.max_image_pixels,
            seconds=config.max_video_seconds,
            frames=config.max_video_frames,
            decode_s=config.video_timeout_s,
        )

    @property
    def stored(self) -> int:
        """Most frames of a file."""
        return int(self.seconds * MAX_RATE) + 1

    def check_bytes(self, count: int) -> None:
        """Reject a file of too many bytes.

        Raises:
            TooLarge: It has more than the limit.
        """
        if count > self.file_bytes:
            raise TooLarge(f"The video has {count} bytes: at most {self.file_bytes} are accepted.")

    def check_chosen(self, count: int) -> None:
        """Reject a choice of too many frames.

        Raises:
            TooLarge: There are more than the limit.
        """
        if count > self.frames:
            raise TooLarge(
                f"{count} frames of the video are to be read: at most {self.frames} are. Ask for fewer by `num_frames` "
                "or a lower `fps`."
            )


class Deadline:
    """The time until which one video must be decoded.

    Args:
        seconds: Seconds from now.
        clock: A clock in seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._end = clock() + seconds

    def check(self) -> None:
        """Raise `TooLarge` if the time is over."""
        if self._clock() > self._end:
            raise TooLarge(
                f"Decoding the video takes more than {self._seconds:g} s, this server's limit. Send a shorter or "
                "smaller one."
            )
