"""Decoding of files that callers send, and of files that no honest caller would send."""

from __future__ import annotations

import io
import re
import struct
import subprocess
import sys
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from PIL import GifImagePlugin, PngImagePlugin, WebPImagePlugin
from PIL import Image as Pillow
from PIL.PngImagePlugin import PngInfo

from staged_pool.runtime.models.images.containers import FREE_READS, MAX_PACKED, MAX_RUN_BYTES, MAX_RUN_PIXELS
from staged_pool.runtime.models.images.decode import MAX_SCANS, MAX_TABLE_BYTES, Encoded, ImageLimits
from staged_pool.runtime.models.images.formats import FORMATS
from staged_pool.runtime.models.images.jpeg import MAX_SEGMENTS, decodable, read_structure
from staged_pool.runtime.requests import Image
from staged_pool.stages.errors import InvalidInput, TooLarge, UnsupportedMedia, UnusableMedia
from tests.models.images.drawing import (
    ALONE,
    Folder,
    chunk,
    drawing,
    encode,
    image,
    pixels,
    png,
    reader,
    save_settings,
)

SMALL: dict[str, bytes] = {format: encode(drawing(24, 24), format) for format in FORMATS}
LIMITS = ImageLimits(image_bytes=20 * 2**20, pixels=64_000_000)


def decode(data: bytes, limits: ImageLimits = LIMITS, **options: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    decoded = Encoded(data, limits).decode(**options)
    assert decoded.mode == "RGB"
    return np.asarray(decoded)


def outcome(data: bytes) -> np.ndarray[Any, np.dtype[np.uint8]] | InvalidInput:
    try:
        return decode(data, ImageLimits(2**20, 10_000))
    except InvalidInput as error:
        return error


def rejection(data: bytes, limits: ImageLimits = LIMITS) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        decode(data, limits)
    return caught.value


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_of_the_list_is_read(format: str) -> None:
    source = drawing(37, 23)
    lossless = {"WebP": {"lossless": True}}.get(format, {})
    wanted = pixels(37, 23).astype(int)
    found = decode(encode(source, format, **lossless)).astype(int)
    assert found.shape == wanted.shape
    lost = {"JPEG": 25, "GIF": 25}.get(format, 0)
    assert np.abs(found - wanted).mean() <= lost


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (encode(drawing(8, 8), "TIFF"), "TIFF"),
        (encode(drawing(8, 8), "AVIF"), "AVIF"),
        (encode(drawing(8, 8), "JPEG2000"), "JPEG 2000"),
        (encode(drawing(8, 8), "ICO"), "ICO"),
        (encode(drawing(8, 8), "PPM"), "PNM"),
        (encode(drawing(8, 8), "EPS"), "PostScript"),
        (encode(drawing(8, 8), "PDF"), "PDF"),
        (b"8BPS\x00\x01" + bytes(40), "PSD"),
        (b"SIMPLE  =                    T" + bytes(80), "FITS"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
        (b"\xef\xbb\xbf\n <svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
        (b"<!doctype html><html>", "HTML"),
        (b"\x00\x00\x00\x18ftypheic" + bytes(40), "HEIC"),
        (b"\x00\x00\x00\x18ftyphevc" + bytes(40), "HEIC"),
        (b"\x00\x00\x00\x1cftypmif1\x00\x00\x00\x00mif1avif" + bytes(40), "AVIF"),
        (b"\x00\x00\x00\x18ftypqt  " + bytes(40), "QuickTime"),
        (b"\x00\x00\x00\x18ftypisom" + bytes(40), "MP4"),
    ],
)
def test_another_format_is_rejected_by_its_name_and_never_opened(data: bytes, name: str) -> None:
    rejected = rejection(data)
    assert type(rejected) is UnsupportedMedia
    assert f"in the format {name}:" in str(rejected)
    assert "JPEG, PNG, WebP, GIF or BMP" in str(rejected)
    assert ("Send a video as a video" in str(rejected)) == (name in ("QuickTime", "MP4"))


@pytest.mark.parametrize(
    "data",
    [
        b"x",
        b"BM is how this text begins",
        b"secret words" * 99,
        bytes(1000),
        b"RIFF1234WAVE",
        encode(drawing(8, 8), "TGA"),
    ],
)
def test_anything_but_an_image_is_rejected_and_not_repeated(data: bytes) -> None:
    rejected = rejection(data)
    assert type(rejected) is UnsupportedMedia
    assert str(rejected).startswith("The image is in no known format")
    assert "secret" not in str(rejected)


def test_an_image_of_no_bytes_is_rejected() -> None:
    rejected = rejection(b"")
    assert type(rejected) is UnusableMedia
    assert "0 bytes" in str(rejected)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WebP"])
def test_a_turned_image_is_made_upright(format: str, orientation: int) -> None:
    # Pixels that a camera would store for this image in each orientation (EXIF 2.32, 4.6.4).
    upright = pixels(32, 16)
    stored = {
        1: upright, 2: upright[:, ::-1], 3: upright[::-1, ::-1], 4: upright[::-1],
        5: upright.transpose(1, 0, 2), 6: np.rot90(upright, 1), 7: np.rot90(upright.transpose(1, 0, 2), 2),
        8: np.rot90(upright, -1),
    }[orientation]  # fmt: skip
    exif = Pillow.Exif()
    exif[0x0112] = orientation
    most: dict[str, dict[str, int]] = {"JPEG": {"quality": 100, "subsampling": 0}, "WebP": {"lossless": True}}
    exact = most.get(format, {})
    data = encode(Pillow.fromarray(np.ascontiguousarray(stored)), format, exif=exif, **exact)
    encoded = Encoded(data, LIMITS)
    if format == "JPEG":
        assert encoded.size == (16, 32)
    found = np.asarray(encoded.decode())
    assert np.abs(found.astype(int) - upright).max() <= (12 if format == "JPEG" else 0)


def _xmp(info: PngInfo) -> None:
    info.add_itxt(
        "XML:com.adobe.xmp",
        '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
        '<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="6"/></rdf:RDF></x:xmpmeta>',
    )


def _raw_profile(info: PngInfo) -> None:
    exif = Pillow.Exif()
    exif[0x0112] = 6
    data = exif.tobytes()
    info.add_text("Raw profile type exif", f"\nexif\n{len(data):8d}\n{data.hex()}\n", zip=True)


@pytest.mark.parametrize("say", [_xmp, _raw_profile], ids=["XMP", "ImageMagick's text"])
def test_a_png_is_made_upright_wherever_its_orientation_is_said(say: Callable[[PngInfo], None]) -> None:
    info = PngInfo()
    say(info)
    image = drawing(20, 10)
    wanted = np.rot90(np.asarray(image.convert("RGB")), -1)
    assert (decode(encode(image, "PNG", pnginfo=info)) == wanted).all()


@pytest.mark.parametrize("value", [0, 9, 77])
def test_an_orientation_that_does_not_exist_leaves_the_image_as_it_is(value: int) -> None:
    exif = Pillow.Exif()
    exif[0x0112] = value
    assert decode(encode(drawing(20, 10), exif=exif)).shape == (10, 20, 3)


def test_a_damaged_exif_part_counts_as_none() -> None:
    data = encode(drawing(20, 10), "JPEG", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\x7f" + bytes(9))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a host may make errors of Pillow's warnings
        assert decode(data).shape == (10, 20, 3)


def test_a_transparent_image_lies_on_white_or_on_the_wanted_colour() -> None:
    values = np.zeros((4, 4, 4), dtype=np.uint8)
    values[:, 2:] = (10, 20, 30, 255)
    values[3] = (200, 100, 0, 51)  # a fifth
    data = encode(Pillow.fromarray(values))
    assert decode(data)[0].tolist() == [[255] * 3] * 2 + [[10, 20, 30]] * 2
    assert decode(data)[3, 0].tolist() == [244, 224, 204]
    assert decode(data, background=(0, 0, 100))[0].tolist() == [[0, 0, 100]] * 2 + [[10, 20, 30]] * 2
    assert decode(data, background=(0, 0, 100))[3, 0].tolist() == [40, 20, 80]


@pytest.mark.parametrize("mode", ["LA", "RGBA"])
def test_every_kind_of_transparency_is_seen(mode: str) -> None:
    clear = Pillow.new(mode, (3, 2), 0)
    assert (decode(encode(clear)) == 255).all()


def test_a_transparent_image_is_blended_in_short_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow holds the interpreter's lock while it blends."""
    values = np.random.default_rng(0).integers(256, size=(701, 300, 4), dtype=np.uint8)
    seen = Pillow.fromarray(values)
    whole = Pillow.alpha_composite(Pillow.new("RGBA", seen.size, (9, 90, 200, 255)), seen).convert("RGB")
    blend, sizes = Pillow.alpha_composite, []

    def spy(below: Pillow.Image, above: Pillow.Image) -> Pillow.Image:
        sizes.append(above.width * above.height)
        return blend(below, above)

    monkeypatch.setattr(Pillow, "alpha_composite", spy)
    assert_array_equal(np.asarray(Encoded(encode(seen), LIMITS).decode((9, 90, 200))), np.asarray(whole))
    assert max(sizes) <= 2**14
    assert sum(sizes) == 701 * 300


def test_a_transparent_palette_entry_and_a_transparent_colour_are_seen() -> None:
    palette = Pillow.new("P", (4, 1))
    palette.putpalette([255, 0, 0, 0, 255, 0])
    palette.putpixel((1, 0), 1)
    assert decode(encode(palette, transparency=0))[0].tolist() == [[255] * 3, [0, 255, 0], [255] * 3, [255] * 3]
    assert decode(encode(palette, "GIF", transparency=1))[0, :2].tolist() == [[255, 0, 0], [255] * 3]
    assert decode(encode(palette))[0].tolist() == [[255, 0, 0], [0, 255, 0], [255, 0, 0], [255, 0, 0]]
    colour = Pillow.new("RGB", (2, 1), (1, 2, 3))
    colour.putpixel((1, 0), (9, 9, 9))
    assert decode(encode(colour, transparency=(1, 2, 3)))[0].tolist() == [[255] * 3, [9, 9, 9]]
    grey = Pillow.new("L", (2, 1), 7)
    grey.putpixel((1, 0), 9)
    assert decode(encode(grey, transparency=7))[0].tolist() == [[255] * 3, [9, 9, 9]]


def grey_or_rgb(depth: int, *samples: tuple[int, ...], clear: tuple[int, ...], interlaced: bool = False) -> bytes:
    """A PNG of one row, or of 3 rows in Adam7, with one transparent colour."""
    channels = len(samples[0])
    bits = "".join(f"{value:0{depth}b}" for sample in samples for value in sample)
    bits += "0" * (-len(bits) % 8)
    row = b"\x00" + int(bits, 2).to_bytes(len(bits) // 8, "big")
    header = struct.pack(">IIBBBBB", len(samples), 1, depth, 0 if channels == 1 else 2, 0, 0, interlaced)
    chunks = [(b"IHDR", header), (b"tRNS", struct.pack(f">{channels}H", *clear))]
    if interlaced:
        assert len(samples) == 2  # passes 1 and 6 hold a pixel each
        half = (len(row) - 1) // 2
        row = row[: 1 + half] + b"\x00" + row[1 + half :]
    chunks += [(b"IDAT", zlib.compress(row)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )


@pytest.mark.parametrize(
    ("depth", "samples", "clear", "shown"),
    [
        (1, (0, 1), 1, [0, 9]),
        (2, (0, 1, 2, 3), 1, [0, 9, 170, 255]),
        (2, (0, 1, 2, 3), 0x0106, [0, 85, 9, 255]),  # of which only the lower two bits count
        (4, (0, 1, 2, 15), 2, [0, 17, 9, 255]),
        (8, (0, 1, 2, 255), 255, [0, 1, 2, 9]),
        (8, (0, 1, 2, 255), 0x0102, [0, 1, 9, 255]),
        (16, (0, 0x1234, 0x12FF, 0x3412, 65535), 0x1234, [0, 9, 0x12, 0x34, 255]),
        (16, (0, 0x1234, 65535), 0, [9, 0x12, 255]),
        (16, (0, 0x1234, 65535), 65535, [0, 0x12, 9]),
    ],
)
def test_a_transparent_grey_is_compared_at_the_depth_of_the_file(
    depth: int, samples: tuple[int, ...], clear: int, shown: list[int]
) -> None:
    data = grey_or_rgb(depth, *((value,) for value in samples), clear=(clear,))
    assert decode(data, background=(9, 9, 9))[0].tolist() == [[value] * 3 for value in shown]


@pytest.mark.parametrize("interlaced", [False, True])
def test_a_transparent_colour_of_sixteen_bits_is_compared_in_all_of_them(interlaced: bool) -> None:
    clear, near, far = (0x1234, 0x5678, 0x9ABC), (0x1234, 0x5679, 0x9ABC), (0x3412, 0x7856, 0xBC9A)
    for other, shown in ((near, [0x12, 0x56, 0x9A]), (far, [0x34, 0x78, 0xBC])):
        data = grey_or_rgb(16, clear, other, clear=clear, interlaced=interlaced)
        assert decode(data, background=(1, 2, 3))[0].tolist() == [[1, 2, 3], shown]
    grey = grey_or_rgb(16, (0x1234,), (0x1235,), clear=(0x1234,), interlaced=interlaced)
    assert decode(grey)[0].tolist() == [[255] * 3, [0x12] * 3]


def test_a_transparent_colour_is_laid_in_strips_as_at_once() -> None:
    values = np.random.default_rng(0).integers(4, size=(900, 700), dtype=np.uint16) * np.uint16(0x0101)
    data = encode(Pillow.fromarray(values), transparency=0x0202)
    wanted = np.where(values == 0x0202, 77, values >> 8)
    assert_array_equal(decode(data, background=(77, 77, 77)), np.repeat(wanted[..., None], 3, axis=-1))


def test_grey_and_black_and_white_become_three_equal_channels() -> None:
    grey = drawing(9, 7).convert("L")
    assert np.array_equal(decode(encode(grey)), np.repeat(np.asarray(grey)[..., None], 3, axis=-1))
    bits = grey.convert("1")
    assert np.array_equal(decode(encode(bits))[..., 0], np.asarray(bits) * np.uint8(255))
    assert decode(encode(grey, "JPEG")).shape == (7, 9, 3)


def test_a_cmyk_jpeg_becomes_the_colours_it_stands_for() -> None:
    for colour in ((255, 0, 0), (0, 200, 0), (255, 255, 255), (0, 0, 0)):
        data = encode(Pillow.new("RGB", (16, 16), colour).convert("CMYK"), "JPEG", quality=100)
        assert Pillow.open(io.BytesIO(data)).mode == "CMYK"
        assert np.abs(decode(data).astype(int) - colour).max() <= 6


def test_of_sixteen_bits_a_channel_the_upper_eight_are_kept() -> None:
    values = np.array([[0, 255, 256, 0x1234, 0x80FF, 65535]], dtype=np.uint16)
    upper = [0, 0, 1, 0x12, 0x80, 255]
    assert decode(encode(Pillow.fromarray(values)))[0].tolist() == [[value] * 3 for value in upper]
    rows = b"".join(b"\x00" + b"".join(struct.pack(">3H", value, 0, 65535) for value in row) for row in values.tolist())
    coloured = bytearray(png(6, 1, data=rows))
    coloured[24] = 16  # bits a channel
    coloured[29:33] = struct.pack(">I", zlib.crc32(bytes(coloured[12:29])))
    assert decode(bytes(coloured))[0].tolist() == [[value, 0, 255] for value in upper]


@pytest.mark.parametrize(
    ("format", "plugin"),
    [
        ("GIF", GifImagePlugin.GifImageFile),
        ("WebP", WebPImagePlugin.WebPImageFile),
        ("PNG", PngImagePlugin.PngImageFile),
    ],
)
def test_of_an_animation_the_first_frame_is_read_and_the_others_are_not(
    format: str, plugin: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Pillow.new("RGB", (16, 16), (200, 30, 30))
    more = [Pillow.new("RGB", (16, 16), (0, 0, k)) for k in range(40)]
    exact = {"WebP": {"lossless": True}}.get(format, {})
    data = encode(first, format, save_all=True, append_images=more, **exact)
    assert Pillow.open(io.BytesIO(data)).n_frames > 30  # type: ignore[attr-defined]
    frames: list[int] = []
    seek = plugin._seek

    def watched(self: Any, frame: int, *more: Any) -> Any:
        frames.append(frame)
        return seek(self, frame, *more)

    monkeypatch.setattr(plugin, "_seek", watched)
    assert (decode(data) == (200, 30, 30)).all()
    assert set(frames) <= {0}


def test_an_image_above_the_limit_of_pixels_is_rejected_by_its_header() -> None:
    bombs = {
        "PNG": png(50_000, 50_000, data=bytes(10)),
        "JPEG": _with_size_of_jpeg(encode(drawing(8, 8), "JPEG"), 65_000, 65_000),
        "GIF": b"GIF89a" + struct.pack("<HH", 65_000, 65_000) + encode(drawing(8, 8), "GIF")[10:],
        "WebP": _vp8x(16_000_000, 16_000_000),
        "BMP": SMALL["BMP"][:18] + struct.pack("<ii", 50_000, 50_000) + SMALL["BMP"][26:],
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for format, data in bombs.items():
            rejected = rejection(data)
            assert type(rejected) is TooLarge, format
            assert "at most 64000000 are accepted" in str(rejected)


def test_a_bomb_takes_no_memory() -> None:
    # In a process of its own: what was taken at most can only be asked for since its beginning.
    program = """
import resource, sys, zlib
from staged_pool.runtime.models.images.decode import Encoded, ImageLimits
from staged_pool.stages.errors import TooLarge
from tests.models.images.drawing import png
bomb = png(20000, 20000, data=bytes(100 * 60001))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    Encoded(bomb, ImageLimits(20 * 2**20, 64_000_000)).decode()
except TooLarge:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 1024  # KiB


def test_the_limit_of_pixels_is_the_server_s_and_not_pillow_s() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = encode(Pillow.new("1", (10_000, 9000)))  # Pillow would warn from 89 million on
        assert type(rejection(data)) is TooLarge
        assert decode(data, ImageLimits(20 * 2**20, 90_000_000)).shape == (9000, 10_000, 3)
    small = encode(drawing(10, 10))
    assert decode(small, ImageLimits(2**20, 100)).shape == (10, 10, 3)
    assert type(rejection(small, ImageLimits(2**20, 99))) is TooLarge


def test_an_image_above_the_limit_of_bytes_is_rejected() -> None:
    data = encode(drawing(10, 10))
    rejected = rejection(data, ImageLimits(len(data) - 1, 1000))
    assert type(rejected) is TooLarge
    assert f"has {len(data)} bytes: at most {len(data) - 1}" in str(rejected)
    assert decode(data, ImageLimits(len(data), 1000)).shape == (10, 10, 3)


def test_a_text_or_a_profile_that_unpacks_to_megabytes_is_rejected() -> None:
    packed = zlib.compress(bytes(100 * 2**20))
    info = PngInfo()
    info.add_text("comment", "x" * (2 * 2**20), zip=True)
    bombs = [
        png(4, 4, (b"zTXt", b"comment\x00\x00" + packed), data=bytes(4 * 13)),
        png(4, 4, (b"iTXt", b"comment\x00\x01\x00\x00\x00" + packed), data=bytes(4 * 13)),
        png(4, 4, (b"iCCP", b"profile\x00\x00" + packed), data=bytes(4 * 13)),
        encode(drawing(4, 4), pnginfo=info),
    ]
    for data in bombs:
        assert type(rejection(data)) is UnusableMedia
    many = [(b"zTXt", b"comment\x00\x00" + zlib.compress(bytes(2**20 - 1)))] * 70
    assert type(rejection(png(4, 4, *many, data=bytes(4 * 13)))) is UnusableMedia


def test_a_jpeg_of_very_many_scans_is_rejected() -> None:
    data = encode(drawing(64, 64), "JPEG", progressive=True)
    scan = data.index(b"\xff\xda")
    end = data.index(b"\xff", scan + 14)
    while data[end + 1] == 0:
        end = data.index(b"\xff", end + 2)
    slow = data[:end] + data[scan:end] * MAX_SCANS + data[end:]
    rejected = rejection(slow)
    assert type(rejected) is UnusableMedia
    assert f"at most {MAX_SCANS} are read" in str(rejected)
    assert decode(data).shape == (64, 64, 3)


@pytest.mark.parametrize("length", [0, 8, 248, 256, 4096, 2**16, 2**20, 2**22])
def test_a_scan_is_counted_wherever_the_one_before_it_ends(length: int) -> None:
    scan = b"\xff\xda\x00\x02"
    entropy_coded = b"\xff\x00\x01\xff\xd0\xff\xff\x00" * (length // 8) + b"\x07"
    data = b"\xff\xd8" + (scan + entropy_coded) * 3 + b"\xff\xd9" + scan * 500
    assert read_structure(data).scans == 3
    assert read_structure(b"").scans == 0


BEHIND: dict[str, bytes] = {
    "video": b"\x00\x00\x00\x18ftypmp42" + b"\xff\xda\x00\x0c\x03" * 500,
    "zeros": bytes(1000),
    "line": b"\r\n",
    "image": SMALL["JPEG"] * 200,
    "markers": b"\xff\xda" * 1000,
}


@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize("format", FORMATS)
def test_what_lies_behind_an_image_changes_nothing(format: str, behind: str) -> None:
    assert_array_equal(decode(SMALL[format] + BEHIND[behind]), decode(SMALL[format]))


def test_a_thumbnail_in_a_segment_is_not_taken_for_scans_of_the_image() -> None:
    exif = Pillow.Exif()
    exif[0x0112] = 6
    thumbnails = b"".join(b"\xff\xe3" + struct.pack(">H", len(SMALL["JPEG"]) + 2) + SMALL["JPEG"] for _ in range(200))
    data = encode(drawing(30, 20), "JPEG", exif=exif)
    assert_array_equal(decode(data[:2] + thumbnails + data[2:]), decode(data))


def test_a_photo_with_a_gain_map_and_a_video_shows_its_first_image() -> None:
    pair = encode(drawing(30, 20), "MPO", save_all=True, append_images=[Pillow.new("RGB", (30, 20))])
    assert_array_equal(decode(pair + BEHIND["video"]), decode(pair))


def test_a_bmp_may_have_something_in_its_reserved_bytes() -> None:
    data = bytearray(SMALL["BMP"])
    data[6:10] = b"abcd"
    assert_array_equal(decode(bytes(data)), decode(SMALL["BMP"]))


@pytest.mark.parametrize("progressive", [False, True])
def test_a_jpeg_with_restarts_counts_its_own_scans(progressive: bool) -> None:
    data = encode(drawing(64, 64), "JPEG", progressive=progressive, restart_marker_rows=1)
    assert b"\xff\xd0" in data
    scans = read_structure(data + BEHIND["markers"]).scans
    assert (scans == 1) is not progressive
    assert scans <= 12


def test_a_jpeg_of_endless_segments_is_rejected() -> None:
    data = SMALL["JPEG"]
    rejected = rejection(data[:2] + b"\xff\xfe\x00\x02" * (MAX_SEGMENTS + 1) + data[2:])
    assert f"more than {MAX_SEGMENTS} segments" in str(rejected)


def test_a_jpeg_of_twelve_bits_is_rejected_by_that_name() -> None:
    data = bytearray(SMALL["JPEG"])
    data[data.index(b"\xff\xc0") + 4] = 12
    rejected = rejection(bytes(data))
    assert type(rejected) is UnsupportedMedia
    assert "12 bits a channel" in str(rejected)


def _scans(edge: int, count: int) -> bytes:
    """A progressive JPEG, of few bytes, whose second scan comes so often."""
    data = encode(Pillow.new("L", (edge, edge)), "JPEG", progressive=True)
    starts = [place for place in range(len(data)) if data[place : place + 2] == b"\xff\xda"]
    end = next(place for place in range(starts[1] + 14, len(data)) if data[place] == 0xFF and data[place + 1])
    return data[:end] + data[starts[1] : end] * count + data[end:]


def test_scans_of_a_jpeg_are_bounded_by_what_they_go_over() -> None:
    structure = read_structure(encode(Pillow.new("RGB", (100, 60)), "JPEG", progressive=True, subsampling=0))
    assert structure.samples == 3 * 104 * 64
    assert structure.scanned == 14 * 104 * 64  # those of libjpeg's usual script
    assert structure.buffered
    assert not read_structure(encode(Pillow.new("RGB", (100, 60)), "JPEG")).buffered
    assert read_structure(encode(Pillow.new("RGB", (100, 60)), "JPEG", subsampling=2)).samples == 104 * 64 + 2 * 56 * 32
    slow = _scans(5000, 80)
    assert len(slow) < 200_000
    assert re.search(r"go over its \d+ samples 8\d\.\d times: at most 10 times are read", str(rejection(slow)))
    assert decode(_scans(500, 80)).shape == (500, 500, 3)


FILL: dict[str, bytes] = {
    "fill bytes": b"\xff" * 2**20,
    "zeros behind 0xFF": b"\xff\x00" * 2**19,
    "comments": b"\xff\xfe\x00\x02" * 9000,
    "profiles": (b"\xff\xe2\xff\xf0" + bytes(65518)) * 100,
    "EXIF in many segments": (b"\xff\xe1\xff\xf0Exif\0\0" + bytes(65512)) * 100,
    "thumbnails": (b"\xff\xed\x00\x1aPhotoshop 3.0\x00" + b"8BIM\x03\xed\x00\x00\x00\x00") * 4000,
}


@pytest.mark.parametrize("kind", FILL)
def test_pillow_does_not_see_what_decoding_a_jpeg_does_not_need(kind: str) -> None:
    data = SMALL["JPEG"][:2] + FILL[kind] + SMALL["JPEG"][2:]
    assert len(decodable(data, read_structure(data))) < 2 * len(SMALL["JPEG"])
    assert_array_equal(decode(data), decode(SMALL["JPEG"]))


def test_what_lies_between_the_end_of_a_jpeg_and_its_scans_is_not_looked_for() -> None:
    data = SMALL["JPEG"][:2] + b"\xff\xd9" + b"\xff\xfe\x00\x02" * 10**5 + SMALL["JPEG"][2:]
    assert len(decodable(data, read_structure(data))) < 10
    assert "damaged or ends early" in str(rejection(data))


def test_a_jpeg_of_endless_tables_is_rejected() -> None:
    tables = (b"\xff\xdb\x00\x43\x00" + bytes([1] * 64)) * 1000
    rejected = rejection(SMALL["JPEG"][:2] + tables + SMALL["JPEG"][2:])
    assert f"at most {MAX_TABLE_BYTES} are read" in str(rejected)


def _with_chunks(kind: bytes, count: int, place: bytes, *, body: bytes = b"") -> bytes:
    where = SMALL["PNG"].index(place) - 4
    return SMALL["PNG"][:where] + chunk(kind, body) * count + SMALL["PNG"][where:]


_GIF_HEAD = b"GIF89a" + struct.pack("<HH", 24, 24) + b"\x00\x00\x00"
PARTS: dict[str, tuple[str, bytes]] = {
    "chunks before": ("PNG", _with_chunks(b"abCd", 10**5, b"IDAT")),
    "chunks behind": ("PNG", _with_chunks(b"tEXt", 10**5, b"IEND")),
    "empty chunks of pixels": ("PNG", _with_chunks(b"IDAT", 10**5, b"IDAT")),
    "comment in blocks of one byte": ("GIF", _GIF_HEAD + b"!\xfe" + b"\x01a" * 10**5 + b"\x00" + SMALL["GIF"][13:]),
    "extensions": ("GIF", _GIF_HEAD + b"!\x01\x00" * 10**5 + SMALL["GIF"][13:]),
    "an extension that is only begun": ("GIF", _GIF_HEAD + b"!\xf9\x00" + b"\x01a" * 10**5 + SMALL["GIF"][13:]),
    "bytes between blocks": ("GIF", _GIF_HEAD + bytes(10**5) + SMALL["GIF"][13:]),
}


@pytest.mark.parametrize("kind", PARTS)
def test_a_file_of_very_many_parts_is_rejected(kind: str) -> None:
    format, data = PARTS[kind]
    assert f"is a {format} of very many small parts: at most {FREE_READS} are read" in str(rejection(data))


@pytest.mark.parametrize("format", FORMATS)
def test_a_large_file_is_read_in_few_parts(format: str) -> None:
    bytes_of_noise = encode(Pillow.effect_noise((900, 900), 100).convert("RGB"), format)
    assert decode(bytes_of_noise).shape == (900, 900, 3)
    if format == "PNG":  # as some encoders write it, in chunks of a kilobyte
        packed = zlib.compress(b"".join(b"\x00" + row.tobytes() for row in pixels(900, 900)))
        parts = [(b"IDAT", packed[start : start + 1024]) for start in range(0, len(packed), 1024)]
        whole = png(900, 900, *parts[:-1])
        cut = whole.index(chunk(b"IDAT", zlib.compress(b"")))
        data = whole[:cut] + chunk(*parts[-1]) + chunk(b"IEND", b"")
        assert_array_equal(decode(data), pixels(900, 900))


@pytest.mark.parametrize("kind", [b"zTXt", b"iTXt", b"iCCP"])
def test_a_png_of_very_many_packed_texts_is_rejected(kind: bytes) -> None:
    # Their checksums are wrong, so that Pillow unpacks each and counts none.
    text = (b"p\x00\x01\x00\x00\x00" if kind == b"iTXt" else b"p\x00\x00") + zlib.compress(bytes(1000))[:-4] + bytes(4)
    assert decode(_with_chunks(kind, MAX_PACKED, b"IDAT", body=text)).shape == (24, 24, 3)
    rejected = rejection(_with_chunks(kind, MAX_PACKED + 1, b"IDAT", body=text))
    assert f"more than {MAX_PACKED} compressed texts" in str(rejected)


def _bmp_in_runs(width: int, height: int, codes: bytes) -> bytes:
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(codes), 0, 0, 256, 0)
    palette = b"".join(bytes([value, value, 255 - value, 0]) for value in range(256))
    start = 14 + len(header) + len(palette)
    return b"BM" + struct.pack("<IHHI", start + len(codes), 0, 0, start) + header + palette + codes


def test_a_bmp_in_run_length_codes_is_read_up_to_a_size() -> None:
    rows = b"".join(b"".join(bytes([1, (x + y) % 256]) for x in range(300)) + b"\x00\x00" for y in range(100))
    found = decode(_bmp_in_runs(300, 100, rows + b"\x00\x01"))
    assert found[99, :3].tolist() == [[255 - value, value, value] for value in range(3)]
    for data in (_bmp_in_runs(8000, 8000, b"\x01\x01\x00\x00" * 8000), _bmp_in_runs(1000, 1000, bytes(2**20))):
        assert f"at most {MAX_RUN_PIXELS} pixels and {MAX_RUN_BYTES} bytes are read" in str(rejection(data))


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_that_ends_early_is_rejected(format: str) -> None:
    data = encode(drawing(64, 64), format)
    # A GIF or JPEG that lacks its last byte or two shows all of its image.
    for length in (1, 5, 12, 20, 31, len(data) // 4, len(data) // 2, len(data) * 3 // 4):
        rejected = rejection(data[:length])
        assert type(rejected) in (UnusableMedia, UnsupportedMedia), length
        if length >= 20:
            assert type(rejected) is UnusableMedia


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_rejected_or_shows_an_image_of_its_size(format: str, data: st.DataObject) -> None:
    whole = bytearray(SMALL[format])
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(whole) - 1))
        whole[place] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del whole[data.draw(st.integers(0, len(whole))) :]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of odd metadata
        found = outcome(bytes(whole))
    if isinstance(found, InvalidInput):
        assert len(str(found)) < 200
    else:
        assert found.shape[0] * found.shape[1] <= 10_000


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF\x10\x00\x00\x00WEBPVP8 ", b"GIF89a", b""]),
    st.binary(max_size=300),
)
def test_bytes_that_only_begin_like_an_image_are_rejected(beginning: bytes, rest: bytes) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = outcome(beginning + rest)
    assert isinstance(found, InvalidInput)
    assert len(str(found)) < 200


@pytest.mark.parametrize("size", [(1, 65_535), (65_535, 1), (1, 201), (402, 2)])
def test_a_line_is_rejected_where_its_shape_would_be_kept(size: tuple[int, int], family_folder: Folder) -> None:
    width, height = size
    given = Image(encode(Pillow.new("L", size)))
    for family in ("clip", "dinov2", "qwen2-vl"):
        with pytest.raises(
            UnusableMedia, match=f"{width} x {height} pixels: one edge may be at most 200 times the other"
        ):
            reader(family_folder(family)).read(given)
    assert reader(family_folder("siglip")).read(given).values.shape == (3, 64, 64)
    prepared = reader(family_folder("siglip2-naflex")).read(given)
    assert prepared.grid is not None
    assert prepared.grid[0] * prepared.grid[1] <= 100


@ALONE
def test_a_line_never_reaches_a_processor_that_is_not_followed(tmp_path: Path) -> None:
    # It would bring the shorter edge to 384 pixels, and the longer one to 25 million.
    save_settings(tmp_path, image_processor_type="ConvNextImageProcessor")
    careful = reader(tmp_path)
    assert careful.path == "exact"
    with pytest.raises(UnusableMedia, match="at most 200 times"):
        careful.read(Image(encode(Pillow.new("L", (1, 65_535)))))


def test_the_longest_image_that_keeps_its_shape_is_read(family_folder: Folder) -> None:
    for family in ("clip", "qwen2-vl"):
        assert reader(family_folder(family)).read(image(3, 600)).values.size


def test_a_jpeg_of_several_images_shows_the_first() -> None:
    data = encode(drawing(30, 20), "MPO", save_all=True, append_images=[Pillow.new("RGB", (30, 20))])
    assert decode(data).mean() > 60


def _with_size_of_jpeg(data: bytes, width: int, height: int) -> bytes:
    start = data.index(b"\xff\xc0")
    return data[: start + 5] + struct.pack(">HH", height, width) + data[start + 9 :]


def _vp8x(width: int, height: int) -> bytes:
    body = (
        b"VP8X"
        + struct.pack("<I", 10)
        + bytes(4)
        + (width - 1).to_bytes(3, "little")
        + (height - 1).to_bytes(3, "little")
    )
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body
