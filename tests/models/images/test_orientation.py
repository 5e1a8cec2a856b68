"""Orientations, read without what else EXIF and XMP hold: the same as Pillow reads."""

from __future__ import annotations

import io
import math
import numbers
import struct
import tracemalloc
import warnings
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow
from PIL import ImageOps

from staged_pool.runtime.models.images.decode import Encoded, ImageLimits
from staged_pool.runtime.models.images.orientation import read_orientation
from tests.models.images.drawing import chunk, drawing, encode

TAG = 0x0112


def by_pillow(info: dict[str, Any]) -> int:
    """Return the orientation that `Image.getexif` finds; 0 for an error or no whole number."""
    image = Pillow.new("L", (1, 1))
    image.info.update(info)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            value = image.getexif().get(TAG, 1)
        except Exception:  # noqa: BLE001  # of whatever kind
            return 1
    # `exif_transpose` looks a value up among whole numbers: 6.0 is one of them, and 6.5 and "6" are none.
    is_finite = isinstance(value, numbers.Real) and math.isfinite(value)
    return int(value) if is_finite and value == int(value) else 1


def exif(
    entries: list[tuple[int, int, int, bytes]], *, order: str = "<", offset: int = 8, behind: bytes = b""
) -> bytes:
    """EXIF of one directory, each entry with its tag, type, count and four bytes."""
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}L", offset)
    rows = b"".join(struct.pack(f"{order}HHL", *entry[:3]) + entry[3] for entry in entries)
    gap = bytes(offset - 8)
    return b"Exif\0\0" + head + gap + struct.pack(f"{order}H", len(entries)) + rows + bytes(4) + behind


XMP = b'<rdf:Description tiff:Orientation="%d"/>'


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(("kind", "form"), [(3, "H"), (4, "L"), (8, "h"), (9, "l"), (6, "b"), (13, "L")])
def test_every_whole_number_is_read(order: str, kind: int, form: str) -> None:
    value = struct.pack(f"{order}{form}", 6).ljust(4, b"\0")
    info = {"exif": exif([(0x010F, 3, 1, bytes(4)), (TAG, kind, 1, value)], order=order, offset=20)}
    assert read_orientation(info) == by_pillow(info) == 6


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(
    ("kind", "count", "values"),
    [
        (3, 2, ("HH", 6, 0)),
        (3, 2, ("HH", 6, 6)),
        (3, 3, ("HHH", 6, 1, 2)),
        (4, 2, ("LL", 6, 3)),
        (5, 1, ("LL", 12, 2)),
        (10, 1, ("ll", -6, -1)),
        (11, 1, ("f", 6.0)),
        (12, 1, ("d", 6.0)),
        (16, 1, ("Q", 6)),
    ],
)
def test_the_first_number_counts_however_many_there_are_and_of_whatever_kind(
    order: str, kind: int, count: int, values: tuple[Any, ...]
) -> None:
    value = struct.pack(order + values[0], *values[1:])
    behind = 8 + 2 + 12 + 4
    entry = value.ljust(4, b"\0") if len(value) <= 4 else struct.pack(f"{order}L", behind)
    info = {"exif": exif([(TAG, kind, count, entry)], order=order, behind=value if len(value) > 4 else b"")}
    assert read_orientation(info) == by_pillow(info) == 6


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WebP"])
def test_an_image_with_two_orientations_is_turned_as_by_pillow(form: str) -> None:
    data = io.BytesIO()
    drawing(20, 10).save(data, form, exif=exif([(TAG, 3, 2, b"\6\0\0\0")]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = ImageOps.exif_transpose(Pillow.open(data)).convert("RGB")
    found = Encoded(data.getvalue(), ImageLimits(10_000, 10_000)).decode()
    assert (found.size, found.tobytes()) == (wanted.size, wanted.tobytes())
    assert found.size == (10, 20)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([TAG, 0x010F, 0x0111]),
            st.sampled_from([*range(14), 16, 17]),
            st.integers(0, 5),
            st.binary(min_size=4, max_size=4),
        ),
        max_size=4,
    ),
    st.sampled_from(["<", ">"]),
    st.integers(8, 20),
    st.sampled_from([None, XMP % 3]),
    st.integers(0, 40),
)
def test_a_directory_is_read_as_by_pillow(
    entries: list[tuple[int, int, int, bytes]], order: str, offset: int, xmp: bytes | None, cut: int
) -> None:
    # Where a value of another entry lies outside of the file, Pillow gives up, and we do not.
    entries = [
        (tag, kind, count, value)
        if tag == TAG
        else (tag, kind if kind not in (5, 10, 12, 16) else 3, min(count, 1), value)
        for tag, kind, count, value in entries
    ]
    data = exif(entries, order=order, offset=offset)
    info: dict[str, Any] = {"exif": data[: max(14, len(data) - cut)]}
    if xmp is not None:
        info["xmp"] = xmp
    assert read_orientation(info) == by_pillow(info)


@pytest.mark.parametrize(
    "info",
    [
        {},
        {"exif": b""},
        {"exif": b"Exif\0\0"},
        {"exif": b"Exif\0\0", "xmp": XMP % 4},
        {"exif": b"nonsense"},
        {"xmp": XMP % 5},
        {"XML:com.adobe.xmp": (XMP % 6).decode()},
        {"XML:com.adobe.xmp": "", "xmp": XMP % 7},
        {"xmp": b"<tiff:Orientation>8</tiff:Orientation>"},
        {"Raw profile type exif": "\nexif\n 8\n" + exif([(TAG, 3, 1, b"\6\0\0\0")]).hex()},
        {"Raw profile type exif": "\nexif\n 8\nno digits"},
    ],
)
def test_wherever_an_orientation_is_said_it_is_read_as_by_pillow(info: dict[str, Any]) -> None:
    assert read_orientation(info) == by_pillow(info)


def test_a_value_that_thousands_of_entries_share_is_not_copied() -> None:
    shared = bytes(2**20)
    entries = [(tag + 1000, 1, len(shared), struct.pack("<L", 12 * 5000 + 14)) for tag in range(5000)]
    data = exif([(TAG, 3, 1, b"\6\0\0\0"), *entries], behind=shared)
    png = encode(drawing(20, 10))
    where = png.index(b"IDAT") - 4
    file = Pillow.open(io.BytesIO(png[:where] + chunk(b"eXIf", data[6:]) + png[where:]))
    tracemalloc.start()
    try:
        assert read_orientation(file.info) == 6
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
