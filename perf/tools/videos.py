"""Generated videos: noise that moves, encoded as a camera's MP4 is."""

from __future__ import annotations

from fractions import Fraction
from io import BytesIO
from typing import Any, Final

import numpy as np

WIDTH: Final = 640
HEIGHT: Final = 360
RATE: Final = 24
"""Frames a second."""
_COARSE: Final = 40
"""Pixels between the points of the smooth noise."""
_STEP: Final = 4
"""Pixels by which the noise moves from one frame to the next."""


def mp4(seconds: float, seed: int) -> bytes:
    """Return an H.264 video with B-frames and a keyframe every two seconds."""
    import av
    from PIL import Image

    frames = round(seconds * RATE)
    coarse = np.random.default_rng(seed).integers(
        256, size=(HEIGHT // _COARSE, 2 * WIDTH // _COARSE, 3), dtype=np.uint8
    )
    wide = np.asarray(Image.fromarray(coarse).resize((2 * WIDTH, HEIGHT), Image.Resampling.BICUBIC))
    file = BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=RATE, options={"preset": "veryfast", "threads": "1"})
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        stream.codec_context.gop_size = 2 * RATE
        for place in range(frames):
            start = place * _STEP % WIDTH
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(wide[:, start : start + WIDTH]), format="rgb24")
            frame.pts, frame.time_base = place, Fraction(1, RATE)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()
