"""Decoder of videos by PyAV, with limits that are checked before any frame is decoded.

Treatment of a file:

- Only its bytes are read. FFmpeg gets one demuxer by name, so that no playlist leads it to other files.
- One pass without decoding finds the time of each frame, whatever the header says. Frames are chosen in that order.
- Frames before the first keyframe cannot be decoded, and count as absent. So do frames that an edit list cuts off, and
  those before the time 0.
- Rotation of the stream is applied. Transparency is dropped. Sound, subtitles and cover images are ignored.
- One thread decodes. Threads of FFmpeg gained nothing: other videos are decoded beside this one.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from staged_pool.runtime.models.images.sizes import Size
from staged_pool.runtime.models.videos.formats import Demuxer, find_demuxer
from staged_pool.runtime.models.videos.limits import MAX_STREAMS, Deadline, VideoLimits
from staged_pool.runtime.threads.core_limiter import lend_core
from staged_pool.stages.errors import InvalidInput, TooLarge, UnsupportedMedia, UnusableMedia

EXTRA: Final = "pip install 'staged-pool[video]'"
"""Command that installs the decoder."""

_FORMATS: Final = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,gif"
"""Formats that FFmpeg may open, by its own names."""

_FREE_FRAMES: Final = 64
"""Decoded frames that a file may have above twice the number that it lists."""

Frame = NDArray[np.uint8]
"""Upright RGB: [height, width, 3]."""


class Clip:
    """Encoded video. The times of all frames are known, and nothing is decoded yet.

    Args:
        data: The file.
        limits: Its limits.

    Raises:
        TooLarge: It exceeds a limit.
        UnsupportedMedia: The format is not supported, or the server has no decoder.
        UnusableMedia: It is damaged, or has no frames.
    """

    def __init__(self, data: bytes, limits: VideoLimits) -> None:
        limits.check_bytes(len(data))
        self._demuxer: Demuxer = find_demuxer(data)
        self._av = _import_decoder()
        self._data = data
        self._limits = limits
        self._deadline = Deadline(limits.decode_s)
        with self._open() as (container, stream):
            self.size: Size = stream.codec_context.height, stream.codec_context.width
            """Height and width of a frame as stored, in pixels."""
            _check_size(self.size, limits)
            self._index(container, stream)

    @property
    def frames(self) -> int:
        """Number of frames."""
        return len(self._times)

    @property
    def rate(self) -> float | None:
        """Mean frames a second. None: the video has one frame, or all frames have one time."""
        spread = self._seconds(self._times[-1] - self._times[0])
        return (self.frames - 1) / spread if spread > 0 else None

    @property
    def memory(self) -> int:
        """Bytes that the decoder takes at most: its reference frames, and a frame as RGB, turned and converted."""
        return 48 * self.size[0] * self.size[1]

    def read(self, indices: Sequence[int]) -> Iterator[Frame]:
        """Decode frames, in order.

        Args:
            indices: Indices in the order of time, ascending. Equal ones give the same frame.

        Raises:
            TooLarge: Decoding takes too long, or a frame is larger than the limit.
            UnusableMedia: The file is damaged.
        """
        wanted = [self._times[index] for index in indices]
        given = 0
        try:
            for frame in self._decoded(wanted, seeks=self._demuxer != "gif"):
                given += 1
                yield frame
        except _CannotSeek:  # it is found out before the first frame of a part is given
            for place, frame in enumerate(self._decoded(wanted, seeks=False)):
                if place >= given:
                    yield frame

    def _index(self, container: Any, stream: Any) -> None:
        """Find the times of all frames and of the keyframes, without decoding."""
        times: set[int] = set()
        keys: list[int | None] = []
        self._scale = stream.time_base
        with _calling_decoder():
            for packet in container.demux(stream):
                self._deadline.check()
                if packet.is_keyframe and packet.size:
                    keys.append(packet.pts)  # also of a frame that is not shown: the next ones depend on it
                if packet.size == 0 or packet.pts is None or packet.is_discard:
                    continue
                times.add(packet.pts)
                if len(times) > self._limits.stored:
                    raise TooLarge(f"The video has more than {self._limits.stored} frames: that is the limit.")
        first = min(times, default=0)
        self._keys = sorted(first if key is None else key for key in keys)  # None: before the time 0, in Matroska
        self._times = sorted(time for time in times if self._keys and time >= self._keys[0])
        if not self._times:
            raise UnusableMedia("The video has no frame that can be decoded: it is cut off, or has no keyframe.")
        length = self._seconds(self._times[-1] - self._times[0])
        if length > self._limits.seconds:
            raise TooLarge(f"The video has {length:.0f} s: at most {self._limits.seconds:g} s are accepted.")

    def _seconds(self, ticks: int) -> float:
        return float(ticks * self._scale) if self._scale is not None else 0.0

    def _decoded(self, wanted: Sequence[int], *, seeks: bool) -> Iterator[Frame]:
        """Decode the frames of given times.

        Raises:
            _CannotSeek: A seek leads behind its keyframe.
        """
        most = 2 * self.frames + _FREE_FRAMES
        place, decoded = 0, 0
        with self._open() as (container, stream):
            stream.codec_context.options = {"max_pixels": str(self._limits.pixels)}
            stream.codec_context.thread_count = 1
            stream.thread_type = "NONE"
            while place < len(wanted):
                until = None
                if seeks:
                    until = self._seek(container, stream, wanted[place])
                last: Any = None
                frames = self._frames(container, stream)
                for frame in frames:
                    decoded += 1
                    if decoded > most:
                        raise UnusableMedia(f"The video has {self.frames} frames, but more than {most} come out of it.")
                    if frame.pts is None:
                        continue
                    if seeks and last is None and frame.pts > wanted[place]:
                        raise _CannotSeek
                    last = frame
                    made: Frame | None = None
                    while place < len(wanted) and wanted[place] <= frame.pts:
                        made = self._upright(frame) if made is None else made
                        yield made
                        place += 1
                    if place == len(wanted) or (until is not None and wanted[place] >= until):
                        break  # the next frame is behind another keyframe
                else:
                    yield from self._missing(last, len(wanted) - place)
                    return

    def _missing(self, last: Any, count: int) -> Iterator[Frame]:
        """Give the last frame in the places of listed frames that do not come out."""
        if last is None:
            raise UnusableMedia("The video is damaged: no frame of it can be decoded.")
        for _ in range(count):
            yield self._upright(last)

    def _seek(self, container: Any, stream: Any, time: int) -> int | None:
        """Go to the keyframe at or before a time. Returns the time of the next keyframe; None: there is none."""
        behind = bisect_right(self._keys, time)
        with _calling_decoder():
            container.seek(self._keys[behind - 1], stream=stream, backward=True)
        return self._keys[behind] if behind < len(self._keys) else None

    def _frames(self, container: Any, stream: Any) -> Iterator[Any]:
        decoder = container.decode(stream)
        while True:
            self._deadline.check()
            lend_core()
            with _calling_decoder():
                frame = next(decoder, None)
            if frame is None:
                return
            yield frame

    def _upright(self, frame: Any) -> Frame:
        _check_size((frame.height, frame.width), self._limits)
        with _calling_decoder():
            made = frame.to_ndarray(format="rgb24")
            return cast(Frame, np.rot90(made, k=frame.rotation // 90 % 4))

    @contextmanager
    def _open(self) -> Iterator[tuple[Any, Any]]:
        """Open the file. Yields the container and its first video stream."""
        # FFmpeg decodes a frame while it opens a file: the limit holds for that, too.
        options = {
            "format_whitelist": _FORMATS,
            "max_streams": str(MAX_STREAMS),
            "max_pixels": str(self._limits.pixels),
        }
        source = _Source(self._data, self._deadline)
        with _calling_decoder():
            container = self._av.open(source, format=self._demuxer, options=options, metadata_errors="ignore")
        with container:
            picture = self._av.stream.Disposition.attached_pic
            stream = next((each for each in container.streams.video if not each.disposition & picture), None)
            if stream is None and container.streams.video:
                raise UnusableMedia(
                    "The file has no video stream, only a cover image beside sound. Send the image itself."
                )
            if stream is None:
                raise UnusableMedia("The file has no video stream, only sound or other streams.")
            if stream.codec_context is None:
                raise UnsupportedMedia("The video has a codec that the decoder does not know.")
            yield container, stream


class _CannotSeek(Exception):
    """A seek leads behind its keyframe: the file must be decoded from its beginning."""


class _Source(io.BytesIO):
    """The bytes of a file, which cannot be read after the deadline."""

    def __init__(self, data: bytes, deadline: Deadline) -> None:
        super().__init__(data)
        self._deadline = deadline

    def read(self, size: int | None = -1, /) -> bytes:
        self._deadline.check()
        return super().read(size)


@contextmanager
def _calling_decoder() -> Iterator[None]:
    """Turn every error of the decoder into one about the file. Damaged files raise errors of many kinds.

    Raises:
        UnusableMedia: The file is damaged.
    """
    try:
        yield
    except InvalidInput:
        raise
    except MemoryError as error:  # FFmpeg's own: so it calls a stream above the limit, too
        raise UnusableMedia(
            f"The video has more than {MAX_STREAMS} streams, or its header asks for too much memory."
        ) from error
    except Exception as error:  # of PyAV, and UnicodeDecodeError, IndexError, EOFError, OverflowError
        raise UnusableMedia(f"The video is damaged, or uses an unknown codec: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Return the reason of an error of FFmpeg, without its number and other arguments."""
    reason = getattr(error, "strerror", None) or type(error).__name__
    return f"{str(reason).rstrip('.')}."


def _check_size(size: Size, limits: VideoLimits) -> None:
    height, width = size
    if height < 1 or width < 1:
        raise UnusableMedia("The video tells no size of its frames: its header is damaged or incomplete.")
    if height * width > limits.pixels:
        raise TooLarge(
            f"A frame of the video is {width} x {height} pixels, which are {height * width}: at most {limits.pixels} "
            "are accepted."
        )


def _import_decoder() -> ModuleType:
    """Import PyAV late: few servers read videos, and its wheel has codecs under the GPL.

    Raises:
        UnsupportedMedia: It is not installed.
    """
    try:
        import av
    except ImportError as error:
        raise UnsupportedMedia(f"This server cannot decode videos: its operator may install PyAV by {EXTRA}") from error
    return cast(ModuleType, av)
