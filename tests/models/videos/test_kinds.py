"""Each kind of file in docs/videos.md has the answer that is written there."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import pytest

from staged_pool.api.status import TABLE
from staged_pool.runtime.models.videos.limits import VideoLimits
from staged_pool.stages.errors import InvalidInput
from tests.models.videos import files
from tests.models.videos.files import Make, encode, shots
from tests.models.videos.test_decode import DAMAGED, READABLE, SHOWN, decoded, mp4, numbers

PAGE: Final = Path(__file__).parents[3] / "docs" / "videos.md"
ROWS: Final = dict(
    re.findall(r"^\| (.+?) \| (.+?) \|$", PAGE.read_text().partition("## Kinds of files")[2].partition("## ")[0], re.M)[
        1:
    ]
)
WHOLE: Final = (0, 1, 2, 3, 4, 5, 6, 7)
Shown: TypeAlias = "tuple[int, ...] | None"
needs_scheduling = pytest.mark.skipif(not hasattr(os, "sched_getscheduler"), reason="threads have no policy here")
MOVED: Final[dict[str, Any]] = {"times": range(-3, 5), "container": {"avoid_negative_ts": "disabled"}, "keys": 4}

FRAMES: Mapping[str, tuple[Make, Shown]] = {
    "MP4 with H.264": (READABLE["H.264 in MP4"], WHOLE),
    "MP4 with frames out of order (B-frames)": (READABLE["H.264 with frames out of order"], WHOLE),
    "MP4 in fragments": (READABLE["MP4 in fragments"], WHOLE),
    "MOV": (READABLE["MOV"], WHOLE),
    "HEVC (H.265)": (READABLE["HEVC"], WHOLE),
    "HEVC of 10 bits": (READABLE["HEVC of 10 bits"], WHOLE),
    "AV1 in MP4": (mp4(codec="libsvtav1", keys=3), WHOLE),
    "AV1 in WebM": (mp4(codec="libsvtav1", form="webm"), WHOLE),
    "VP8 in WebM": (READABLE["VP8"], WHOLE),
    "VP9 in WebM": (READABLE["VP9 with keyframes"], WHOLE),
    "VP9 with transparency": (READABLE["VP9 with transparency"], WHOLE),
    "Matroska": (READABLE["Matroska"], WHOLE),
    "GIF": (mp4(form="gif", codec="gif", pixels="rgb8"), (1, 1, 3, 3, 4, 6, 6, 6)),
    "turned by 90, 180 or 270 degrees": (lambda: files.turned(encode(SHOWN), 270), WHOLE),
    "variable frame rate": (READABLE["variable rate"], WHOLE),
    "one frame": (lambda: encode(shots(1)), (0,)),
    "video with a cover image": (lambda: files.with_cover(SHOWN), WHOLE),
    "frames of one pixel": (lambda: encode(shots(3, 1, 1), form="matroska", codec="ffv1", pixels="yuv444p"), (0, 1, 2)),
    "size that changes midway": (lambda: files.sizes_midway(second=(48, 32)), (0, 1, 2, 3) * 2),
    "edit list that cuts the beginning": (
        lambda: files.cut_by_edits(encode(SHOWN, options={"preset": "veryfast", "bf": "2"}, keys=5), 3),
        WHOLE[3:],
    ),
    "times below zero": (lambda: encode(SHOWN, form="matroska", **MOVED), WHOLE[3:]),
    "no keyframe at the beginning": (lambda: files.without_first(encode(SHOWN, keys=5), 2), WHOLE[5:]),
    "first half of a WebM": (lambda: _half(encode(SHOWN, form="webm", codec="libvpx-vp9", keys=1)), None),
    "header of 8K around small frames": (READABLE["header of 8K"], WHOLE),
    "header of ten hours around one second": (READABLE["header of ten hours"], WHOLE),
}
"""Files, and the numbers of the frames that are read. None: some from the beginning."""

ERRORS: Mapping[str, Make] = {
    "frames above `--max-image-pixels`": lambda: encode([np.zeros((2048, 2048, 3), np.uint8)], options={"qp": "50"}),
    "longer than `--max-video-seconds`": lambda: encode(SHOWN, times=[*range(7), 700]),
    "larger than `--max-video-bytes`": lambda: encode(SHOWN) + bytes(2**22),
    "no known format, such as text": lambda: b"Dear sir,\nthis is no video.\n",
    "MPEG-TS": DAMAGED["MPEG-TS"][0],
    "AVI": DAMAGED["AVI"][0],
    "animated WebP": DAMAGED["an animated WebP"][0],
    "HLS playlist": DAMAGED["an HLS playlist"][0],
    "list of files for FFmpeg (ffconcat)": DAMAGED["a list of files"][0],
    "image, such as JPEG or PNG": DAMAGED["a JPEG"][0],
    "first half of an MP4": DAMAGED["half an MP4"][0],
    "sound alone": files.sound,
    "sound with a cover image": files.with_cover,
    "no frames": lambda: files.with_number(files.with_number(encode(SHOWN), b"stsz", 8, 0), b"stts", 4, 0),
    "no keyframe": DAMAGED["no keyframe"][0],
    "thousands of streams": DAMAGED["thousands of streams"][0],
    "empty file": lambda: b"",
}


def _half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def test_the_page_has_every_kind() -> None:
    assert list(ROWS) == [*FRAMES, *ERRORS]
    assert [answer for answer in ROWS.values() if answer[0].isdigit()] == [*ROWS.values()][len(FRAMES) :]


@pytest.mark.parametrize("kind", FRAMES)
def test_a_file_has_the_frames_of_the_page(kind: str, limits: VideoLimits) -> None:
    make, wanted = FRAMES[kind]
    data = make()
    found = decoded(data, limits)
    if wanted is None:
        assert 0 < len(found) < len(WHOLE)
        wanted = WHOLE[: len(found)]
    assert numbers(found) == [*wanted]
    (last,) = decoded(data, limits, [len(found) - 1])
    assert np.array_equal(last, found[-1])


@pytest.mark.parametrize("kind", ERRORS)
def test_a_file_has_the_error_of_the_page(kind: str, limits: VideoLimits) -> None:
    status, _, words = ROWS[kind].partition(": ")
    with pytest.raises(InvalidInput, match=words.strip("`")) as caught:
        decoded(ERRORS[kind](), limits)
    assert TABLE[type(caught.value)].status == int(status)


@needs_scheduling
def test_neither_making_nor_reading_av1_changes_the_scheduling_of_the_thread(limits: VideoLimits) -> None:
    before = os.sched_getscheduler(0)
    made = mp4(codec="libsvtav1")()
    assert os.sched_getscheduler(0) == before
    assert numbers(decoded(made, limits)) == [*WHOLE]
    assert os.sched_getscheduler(0) == before
