"""Video files of many kinds, made by PyAV or from bytes, a few kilobytes each."""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image

Frames = Sequence[NDArray[np.uint8]]
Make = Callable[[], bytes]


def shots(count: int, height: int = 48, width: int = 64) -> list[NDArray[np.uint8]]:
    """Frames of one colour each, which no codec confuses: the red value of frame i is 20 + 20 i."""
    found = []
    for index in range(count):
        frame = np.full((height, width, 3), 60, np.uint8)
        frame[..., 0] = 20 + 20 * index % 230
        frame[: height // 2, : width // 2, 1] = 200  # the corner shows which way is up
        found.append(frame)
    return found


def encode(
    frames: Frames,
    *,
    form: str = "mp4",
    codec: str = "libx264",
    pixels: str = "yuv420p",
    rate: int = 10,
    times: Sequence[int] | None = None,
    options: dict[str, str] | None = None,
    keys: int = 1000,
    container: dict[str, str] | None = None,
) -> bytes:
    """Encode frames.

    Args:
        frames: Frames of one size.
        form: Container.
        codec: Encoder.
        pixels: Pixel format.
        rate: Frames a second.
        times: Time of each frame in units of `1 / rate`. None: one after the other.
        options: Options of the encoder.
        keys: Frames from one keyframe to the next.
        container: Options of the container.
    """
    file = io.BytesIO()
    with _usual_scheduling(), av.open(file, "w", format=form, options=container or {}) as made:
        stream: Any = made.add_stream(codec, rate=rate, options={**_FAST.get(codec, {}), **(options or {})})
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = pixels
        stream.codec_context.gop_size = keys
        stream.thread_type = "NONE"
        for index, frame in enumerate(frames):
            image = av.VideoFrame.from_ndarray(frame, format="rgb24").reformat(format=pixels)
            image.pts = index if times is None else times[index]
            image.time_base = Fraction(1, rate)
            made.mux(stream.encode(image))
        made.mux(stream.encode())
    return file.getvalue()


@contextmanager
def _usual_scheduling() -> Iterator[None]:
    """Keep the scheduling of this thread: the encoder of AV1 makes it real-time where the user is root.

    Everything that the tests start later would be real-time, too, and hold up all else on the machine.
    """
    if not hasattr(os, "sched_setscheduler"):
        yield
        return
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, parameters)


_FAST: dict[str, dict[str, str]] = {
    "libx264": {"preset": "ultrafast", "qp": "10", "threads": "1"},
    "libx265": {"preset": "ultrafast", "x265-params": "log-level=none:pools=1:frame-threads=1"},
    "libvpx": {"deadline": "realtime", "cpu-used": "8", "threads": "1"},
    "libvpx-vp9": {"deadline": "realtime", "cpu-used": "8", "threads": "1"},
    "libsvtav1": {"preset": "13", "svtav1-params": "lp=1"},
}


def sound(form: str = "mp4") -> bytes:
    """Encode a second of silence, without images."""
    file = io.BytesIO()
    with av.open(file, "w", format=form) as made:
        stream: Any = made.add_stream("aac", rate=8000, layout="mono")
        for start in range(0, 8000, 1024):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            frame.sample_rate, frame.pts = 8000, start
            made.mux(stream.encode(frame))
        made.mux(stream.encode())
    return file.getvalue()


def with_cover(frames: Frames = ()) -> bytes:
    """Encode silence with a cover image, and a video if there are frames."""
    picture, file = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (64, 48), "red").save(picture, "JPEG")
    with av.open(file, "w", format="mp4") as made:
        cover: Any = made.add_stream("mjpeg")
        cover.width, cover.height, cover.pix_fmt = 64, 48, "yuvj420p"
        cover.disposition = av.stream.Disposition.attached_pic
        silence: Any = made.add_stream("aac", rate=8000, layout="mono")
        video: Any = None
        if frames:
            video = made.add_stream("libx264", rate=10)
            video.height, video.width = frames[0].shape[:2]
            video.pix_fmt = "yuv420p"
        made.start_encoding()
        packet = av.Packet(picture.getvalue())
        packet.stream, packet.pts, packet.dts, packet.is_keyframe = cover, 0, 0, True
        made.mux(packet)
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        sound.sample_rate, sound.pts = 8000, 0
        made.mux([*silence.encode(sound), *silence.encode()])
        for index, frame in enumerate(frames):
            shown = av.VideoFrame.from_ndarray(frame, format="rgb24")
            shown.pts, shown.time_base = index, Fraction(1, 10)
            made.mux(video.encode(shown))
        if frames:
            made.mux(video.encode())
    return file.getvalue()


def webp(count: int = 2) -> bytes:
    """Encode a WebP, which is an animation if it has several frames."""
    file = io.BytesIO()
    first, *others = [Image.new("RGB", (8, 8), (20 * index, 0, 0)) for index in range(count)]
    first.save(file, "WEBP", save_all=count > 1, append_images=others)
    return file.getvalue()


def turned(data: bytes, degrees: int) -> bytes:
    """Set the rotation of an MP4 in its track header."""
    cosine, sine = {0: (1, 0), 90: (0, 1), 180: (-1, 0), 270: (0, -1)}[degrees]
    changed = bytearray(data)
    start = data.find(b"tkhd") + 4 + 40
    matrix = (cosine << 16, sine << 16, 0, -sine << 16, cosine << 16, 0, 0, 0, 1 << 30)
    changed[start : start + 36] = struct.pack(">9i", *matrix)
    return bytes(changed)


def with_number(data: bytes, box: bytes, offset: int, value: int) -> bytes:
    """Write a number behind the name of a box."""
    changed = bytearray(data)
    start = data.index(box) + len(box) + offset
    changed[start : start + 4] = struct.pack(">I", value)
    return bytes(changed)


def with_size(data: bytes, width: int, height: int) -> bytes:
    """Let the header of an MP4 tell another size than the stream has."""
    changed = with_number(data, b"tkhd", 76, width << 16)
    changed = with_number(changed, b"tkhd", 80, height << 16)
    entry = changed.find(b"avc1", changed.find(b"stsd"))
    return changed[: entry + 28] + struct.pack(">HH", width, height) + changed[entry + 32 :]


def with_duration(data: bytes, factor: int) -> bytes:
    """Multiply the duration in the headers of an MP4."""
    for box in (b"mvhd", b"mdhd"):
        start = data.index(box) + 4 + 16
        (length,) = struct.unpack(">I", data[start : start + 4])
        data = with_number(data, box, 16, min(length * factor, 2**32 - 1))
    return data


def cut_by_edits(data: bytes, frames: int) -> bytes:
    """Let the edit list of an MP4 begin some frames later. It has 10 frames a second."""
    start = data.index(b"elst") + 4
    duration, first = struct.unpack(">Ii", data[start + 8 : start + 16])
    (scale,) = struct.unpack(">I", data[data.index(b"mdhd") + 16 :][:4])
    changed = with_number(data, b"elst", 12, first + frames * scale // 10)
    return with_number(changed, b"elst", 8, duration - frames * 1000 // 10)


def flipped(data: bytes, seed: int) -> bytes:
    """Replace 20 bytes by others."""
    random = np.random.default_rng(seed)
    changed = bytearray(data)
    for place in random.integers(16, len(data), 20):
        changed[int(place)] = int(random.integers(256))
    return bytes(changed)


def many_streams(count: int) -> bytes:
    """Write an MP4 of many empty tracks by hand: FFmpeg's own writer crashes above a thousand."""
    one = encode(shots(2))
    start = one.index(b"moov") - 4
    (length,) = struct.unpack(">I", one[start : start + 4])
    moov = one[start + 8 : start + length]
    first = moov.index(b"trak") - 4
    (size,) = struct.unpack(">I", moov[first : first + 4])
    track = moov[first : first + size]
    wide = moov[:first] + track * count + moov[first + size :]
    return one[:start] + struct.pack(">I", len(wide) + 8) + b"moov" + wide + one[start + length :]


def sizes_midway(second: tuple[int, int]) -> bytes:
    """Join two raw H.264 streams in one MP4: frames of 48 x 64, then those of another size."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as made:
        streams = [encode(shots(4, *size), form="h264") for size in ((48, 64), second)]
        out: Any = None
        clock = 0
        for raw in streams:
            with av.open(io.BytesIO(raw), format="h264") as given:
                source = given.streams.video[0]
                if out is None:
                    out = made.add_stream_from_template(source)
                    out.time_base = Fraction(1, 10)
                for packet in given.demux(source):
                    if packet.size:
                        packet.stream = out
                        packet.pts = packet.dts = clock
                        packet.time_base = out.time_base
                        clock += 1
                        made.mux(packet)
    return file.getvalue()


def without_first(data: bytes, count: int) -> bytes:
    """Copy an MP4 to Matroska without its first frames: the next ones depend on them."""
    file = io.BytesIO()
    with av.open(io.BytesIO(data)) as given, av.open(file, "w", format="matroska") as made:
        source = given.streams.video[0]
        out = made.add_stream_from_template(source)
        for index, packet in enumerate(given.demux(source)):
            if packet.size and index >= count:
                packet.stream = out
                made.mux(packet)
    return file.getvalue()
