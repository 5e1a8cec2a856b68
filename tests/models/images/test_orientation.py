"""Orientations, read without what else EXIF and XMP hold: the same as Pillow reads."""

from __future__ import annotations

import io
import struct
import tracemalloc
import warnings
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow

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
    return value if isinstance(value, int) else 1


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


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([TAG, 0x010F, 0x0111]),
            st.integers(0, 13),
            st.integers(0, 3),
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
    # Where a value lies elsewhere Pillow looks for it, and gives up where that is outside of the file.
    entries = [
        (tag, kind if kind not in (5, 10, 12) else 3, min(count, 1), value) for tag, kind, count, value in entries
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
