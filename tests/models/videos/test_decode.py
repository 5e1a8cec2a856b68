"""Every kind of video file gives its frames, or an error that names the fault."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from staged_pool.runtime.models.videos import decode
from staged_pool.runtime.models.videos.decode import Clip
from staged_pool.runtime.models.videos.formats import find_demuxer
from staged_pool.runtime.models.videos.limits import Deadline, VideoLimits
from staged_pool.stages.errors import InvalidInput, TooLarge, UnsupportedMedia, UnusableMedia
from tests.models.videos import files
from tests.models.videos.files import Make, encode, shots

SHOWN = shots(8)
STEP = 20
"""Step of red from one frame to the next."""


def decoded(data: bytes, limits: VideoLimits, indices: Sequence[int] | None = None) -> list[NDArray[np.uint8]]:
    clip = Clip(data, limits)
    return list(clip.read(range(clip.frames) if indices is None else indices))


def numbers(frames: Sequence[NDArray[np.uint8]]) -> list[int]:
    """Tell frames of `shots` apart by their colour."""
    return [round((int(frame[-1, -1, 0]) - 18) / STEP) for frame in frames]


def webm(**options: Any) -> Make:
    return lambda: encode(SHOWN, form="webm", **{"codec": "libvpx", **options})


def mp4(**options: Any) -> Make:
    return lambda: encode(SHOWN, **options)


READABLE: dict[str, Make] = {
    "H.264 in MP4": mp4(),
    "H.264 with keyframes": mp4(keys=3),
    "H.264 with frames out of order": mp4(options={"preset": "veryfast", "bf": "2"}, keys=5),
    "HEVC": mp4(codec="libx265", keys=4),
    "HEVC of 10 bits": mp4(codec="libx265", pixels="yuv420p10le"),
    "MOV": mp4(form="mov"),
    "ProRes of 10 bits": mp4(form="mov", codec="prores_ks", pixels="yuv422p10le"),
    "Motion JPEG": mp4(form="mov", codec="mjpeg", pixels="yuvj420p"),
    "MP4 in fragments": mp4(container={"movflags": "frag_keyframe+empty_moov"}, keys=3),
    "VP8": webm(),
    "VP9 with keyframes": webm(codec="libvpx-vp9", keys=3),
    "VP9 with transparency": webm(codec="libvpx-vp9", pixels="yuva420p"),
    "Matroska": mp4(form="matroska", keys=3),
    "variable rate": mp4(times=[0, 1, 2, 10, 11, 30, 31, 32], keys=3),
    "header of 8K": lambda: files.with_size(encode(SHOWN), 7680, 4320),
    "header of ten hours": lambda: files.with_duration(encode(SHOWN), 360_000),
    "header of two billion frames": lambda: files.with_number(encode(SHOWN), b"stts", 8, 2_000_000_000),
}
"""Files of the eight frames of `SHOWN`."""


@pytest.mark.parametrize("kind", READABLE)
def test_frames_are_found_by_their_place_in_time(kind: str, limits: VideoLimits) -> None:
    data = READABLE[kind]()
    whole = decoded(data, limits)
    assert numbers(whole) == [*range(8)]
    assert {frame.shape for frame in whole} == {(48, 64, 3)}
    for chosen in ([0, 3, 6], [7], [2, 2, 5], [4, 5]):
        found = decoded(data, limits, chosen)
        assert all(np.array_equal(frame, whole[index]) for frame, index in zip(found, chosen, strict=True))


def test_the_rate_comes_from_the_times_of_the_frames(limits: VideoLimits) -> None:
    assert Clip(encode(SHOWN, rate=25), limits).rate == pytest.approx(25)
    assert Clip(READABLE["header of ten hours"](), limits).rate == pytest.approx(10)
    assert Clip(READABLE["variable rate"](), limits).rate == pytest.approx(7 / 3.2)
    assert Clip(encode(SHOWN[:1]), limits).rate is None


@pytest.mark.parametrize(("count", "size"), [(1, (48, 64)), (5, (48, 64)), (3, (2, 2)), (2, (98, 34))])
def test_frames_of_any_number_and_size(count: int, size: tuple[int, int], limits: VideoLimits) -> None:
    found = decoded(encode(shots(count, *size)), limits)
    assert numbers(found) == [*range(count)]
    assert {frame.shape for frame in found} == {(*size, 3)}


def test_a_frame_of_one_pixel(limits: VideoLimits) -> None:
    found = decoded(encode(shots(2, 1, 1), form="matroska", codec="ffv1", pixels="yuv444p"), limits)
    assert [frame.shape for frame in found] == [(1, 1, 3)] * 2


def test_a_gif_is_decoded_from_its_beginning(limits: VideoLimits) -> None:
    data = encode(SHOWN, form="gif", codec="gif", pixels="rgb8")
    whole = decoded(data, limits)
    assert [int(frame[-1, -1, 0]) for frame in whole] == [36, 36, 72, 72, 108, 144, 144, 144]
    assert np.array_equal(decoded(data, limits, [5])[0], whole[5])


@pytest.mark.parametrize(("degrees", "corner"), [(0, (0, 0)), (90, (0, -1)), (180, (-1, -1)), (270, (-1, 0))])
def test_the_rotation_of_a_stream_is_applied(degrees: int, corner: tuple[int, int], limits: VideoLimits) -> None:
    found = decoded(files.turned(encode(SHOWN), degrees), limits)
    assert found[0].shape == ((48, 64, 3) if degrees % 180 == 0 else (64, 48, 3))
    greens = {place: int(found[0][place][1]) for place in itertools.product((0, -1), repeat=2)}
    assert max(greens, key=lambda place: greens[place]) == corner
    assert sorted(greens.values())[-2] < 100


def test_a_size_that_changes_midway_is_that_of_each_frame(limits: VideoLimits) -> None:
    found = decoded(files.sizes_midway(second=(48, 32)), limits)
    assert len(found) == 8
    assert numbers(found) == [0, 1, 2, 3, 0, 1, 2, 3]


def test_frames_before_the_first_keyframe_count_as_absent(limits: VideoLimits) -> None:
    data = files.without_first(encode(SHOWN, keys=5), 2)
    clip = Clip(data, limits)
    assert clip.frames == 3
    assert numbers(list(clip.read(range(3)))) == [5, 6, 7]


@pytest.mark.parametrize("cut", [1, 3, 5, 6])
def test_frames_that_an_edit_list_cuts_off_still_help_to_decode_others(cut: int, limits: VideoLimits) -> None:
    data = encode(SHOWN, options={"preset": "veryfast", "bf": "2"}, keys=5)
    clip = Clip(files.cut_by_edits(data, cut), limits)
    assert clip.frames == 8 - cut
    assert numbers(list(clip.read(range(clip.frames)))) == [*range(cut, 8)]
    assert numbers(list(clip.read([clip.frames - 1]))) == [7]


@pytest.mark.parametrize("form", ["mp4", "mov", "matroska"])
@pytest.mark.parametrize("out_of_order", ["0", "2"])
def test_frames_before_the_time_zero_count_as_absent(form: str, out_of_order: str, limits: VideoLimits) -> None:
    data = encode(
        SHOWN,
        form=form,
        times=range(-3, 5),
        keys=4,
        options={"preset": "veryfast", "bf": out_of_order},
        container={"avoid_negative_ts": "disabled"},
    )
    clip = Clip(data, limits)
    assert numbers(list(clip.read(range(clip.frames)))) == [3, 4, 5, 6, 7]
    assert numbers(list(clip.read([0, 3]))) == [3, 6]


@pytest.mark.parametrize("kept", [0.4, 0.7, 0.95])
def test_a_webm_that_ends_early_has_the_frames_before_its_end(kept: float, limits: VideoLimits) -> None:
    data = encode(shots(8), form="webm", codec="libvpx-vp9", keys=1)
    found = decoded(data[: int(len(data) * kept)], limits)
    assert numbers(found) == [*range(len(found))]
    assert 0 < len(found) <= 8


DAMAGED: dict[str, tuple[Make, type[InvalidInput], str]] = {
    "no bytes": (lambda: b"", UnusableMedia, "it has 0 bytes"),
    "noise": (lambda: np.random.default_rng(0).bytes(5000), UnsupportedMedia, "in no known format"),
    "MPEG-TS": (mp4(form="mpegts"), UnsupportedMedia, "in the format MPEG-TS: it must be MP4, MOV, WebM or GIF"),
    "AVI": (mp4(form="avi"), UnsupportedMedia, "in the format AVI:"),
    "a WAV": (lambda: b"RIFF\0\0\0\0WAVEfmt " + bytes(40), UnsupportedMedia, "WAV, which is sound"),
    "an animated WebP": (files.webp, UnsupportedMedia, "animated WebP, an image: .* Send an image as an image"),
    "a WebP": (lambda: files.webp(1), UnsupportedMedia, "in the format WebP, an image: "),
    "Flash": (mp4(form="flv"), UnsupportedMedia, "Flash video"),
    "an HLS playlist": (lambda: b"#EXTM3U\n#EXTINF:2,\nfile:///etc/passwd\n", UnsupportedMedia, "an HLS playlist"),
    "a list of files": (lambda: b"ffconcat version 1.0\nfile a.mp4\n", UnsupportedMedia, "an FFmpeg playlist"),
    "a JPEG": (lambda: b"\xff\xd8\xff\xe0" + bytes(40), UnsupportedMedia, "JPEG, an image"),
    "an AVIF": (lambda: b"\0\0\0\x1cftypavif" + bytes(40), UnsupportedMedia, "AVIF or HEIC, an image"),
    "sound alone": (files.sound, UnusableMedia, "has no video stream, only sound"),
    "no keyframe": (lambda: files.without_first(encode(SHOWN), 1), UnusableMedia, "no frame that can be decoded"),
    "a beginning without frames": (
        lambda: encode(SHOWN, container={"movflags": "frag_keyframe+empty_moov"})[:765],
        UnusableMedia,
        "damaged|no frame that can be decoded",
    ),
    "half an MP4": (lambda: encode(SHOWN)[:1400], UnusableMedia, "damaged"),
    "a header alone": (lambda: b"\0\0\0\x18ftypisom" + bytes(12), UnusableMedia, "damaged"),
    "a table of 400 million sizes": (
        lambda: files.with_number(encode(SHOWN), b"stsz", 8, 400_000_000),
        UnusableMedia,
        "damaged",
    ),
    "thousands of streams": (lambda: files.many_streams(2000), UnusableMedia, "more than 8 streams"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_other_files_are_rejected_with_what_is_wrong(kind: str, limits: VideoLimits) -> None:
    make, error, words = DAMAGED[kind]
    with pytest.raises(error, match=words):
        decoded(make(), limits)


def test_flipped_bits_give_frames_or_an_error(limits: VideoLimits) -> None:
    outcomes = {"frames": 0, "error": 0}
    for kind in ("H.264 with keyframes", "HEVC", "VP8", "Matroska"):
        data = READABLE[kind]()
        for seed in range(12):
            try:
                found = decoded(files.flipped(data, seed), limits)
            except InvalidInput:
                outcomes["error"] += 1
            else:
                outcomes["frames"] += 1
                assert found
    assert min(outcomes.values()) > 3


# Limits


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"file_bytes": 1000}, "at most 1000 are accepted"),
        ({"pixels": 64 * 48 - 1}, "A frame of the video is 64 x 48 pixels, which are 3072: at most 3071 are accepted"),
        ({"seconds": 0.5}, "at most 0.5 s are accepted"),
        ({"seconds": 0.01}, "more than 3 frames: that is the limit"),
    ],
)
def test_limits_hold_before_anything_is_decoded(changed: dict[str, Any], words: str, limits: VideoLimits) -> None:
    with pytest.raises(TooLarge, match=words):
        Clip(encode(SHOWN), replace(limits, **changed))


def test_a_large_frame_is_rejected_before_the_decoder_has_memory_for_it(limits: VideoLimits) -> None:
    data = encode([np.zeros((2048, 2048, 3), np.uint8)], options={"qp": "50"})
    assert len(data) < 30_000
    with pytest.raises(TooLarge, match="2048 x 2048 pixels"):
        Clip(data, limits)


def test_a_frame_that_becomes_larger_midway_is_rejected(limits: VideoLimits) -> None:
    data = files.sizes_midway(second=(96, 128))
    assert [frame.shape[0] for frame in decoded(data, limits)] == [48] * 4 + [96] * 4
    small = replace(limits, pixels=64 * 48)
    assert numbers(decoded(data, small, [0, 3])) == [0, 3]
    with pytest.raises(UnusableMedia, match="damaged"):  # the decoder itself has the limit, and fails
        decoded(data, small)


def test_a_deadline_ends_decoding_between_frames_and_inside_reads(limits: VideoLimits) -> None:
    clip = Clip(encode(SHOWN), limits)
    ticks = itertools.count()
    clip._deadline = Deadline(5.0, clock=lambda: float(next(ticks)))
    with pytest.raises(TooLarge, match="takes more than 5 s"):
        list(clip.read(range(8)))
    with pytest.raises(TooLarge, match="takes more than 0 s"):
        Clip(encode(SHOWN), replace(limits, decode_s=0.0))


def test_a_choice_of_too_many_frames_says_what_to_ask_for(limits: VideoLimits) -> None:
    limits.check_chosen(768)
    with pytest.raises(TooLarge, match="`num_frames` or a lower `fps`"):
        limits.check_chosen(769)


# Surroundings


def test_no_other_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: VideoLimits) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.mp4").write_bytes(encode(SHOWN))
    script = b"ffconcat version 1.0\nfile a.mp4\n"
    with pytest.raises(UnsupportedMedia):
        Clip(script, limits)
    monkeypatch.setattr(decode, "find_demuxer", lambda data: "mov")  # as if the check of the first bytes were fooled
    with pytest.raises(UnusableMedia):
        Clip(script, limits)


def test_without_the_decoder_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, limits: VideoLimits
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(UnsupportedMedia, match=r"pip install 'staged-pool\[video\]'"):
        Clip(b"\0\0\0\x18ftypisom" + bytes(12), limits)


def test_the_decoder_has_one_thread(monkeypatch: pytest.MonkeyPatch, limits: VideoLimits) -> None:
    clip = Clip(encode(SHOWN), limits)
    seen: list[tuple[str, int]] = []
    kept = clip._frames

    def frames(container: Any, stream: Any) -> Any:
        seen.append((str(stream.thread_type), stream.codec_context.thread_count))
        return kept(container, stream)

    monkeypatch.setattr(clip, "_frames", frames)
    assert numbers(list(clip.read([0, 7]))) == [0, 7]
    assert seen == [(str(av.codec.context.ThreadType.NONE), 1)]


def test_formats_are_told_apart_by_their_first_bytes() -> None:
    found: dict[str, Callable[[], bytes]] = {"mov": mp4(), "matroska": webm(), "gif": lambda: b"GIF89a" + bytes(20)}
    for name, make in found.items():
        assert find_demuxer(make()) == name
