"""Format of an encoded image, by its first bytes: Pillow never has to guess."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

from staged_pool.stages.errors import UnsupportedMedia, UnusableMedia

ImageFormat: TypeAlias = Literal["JPEG", "PNG", "WebP", "GIF", "BMP"]

FORMATS: Final[tuple[ImageFormat, ...]] = ("JPEG", "PNG", "WebP", "GIF", "BMP")
"""Supported formats."""

_CURSOR: Final = b"\x00\x00\x02\x00"

_OTHERS: Final = (
    (b"II*\x00", "TIFF"), (b"MM\x00*", "TIFF"), (b"II+\x00", "TIFF"), (b"MM\x00+", "TIFF"),
    (b"%PDF-", "PDF"), (b"%!PS", "PostScript"), (b"\xc5\xd0\xd3\xc6", "PostScript"), (b"8BPS", "PSD"),
    (b"SIMPLE  =", "FITS"), (b"\x00\x00\x00\x0cjP  ", "JPEG 2000"), (b"\xff\x4f\xff\x51", "JPEG 2000"),
    (b"\xff\x0a", "JPEG XL"), (b"\x00\x00\x00\x0cJXL ", "JPEG XL"), (b"\x00\x00\x01\x00", "ICO"),
    (_CURSOR, "CUR"),
    (b"icns", "ICNS"), (b"qoif", "QOI"), (b"DDS ", "DDS"), (b"\x89HDF", "HDF5"), (b"\x1aE\xdf\xa3", "Matroska"),
    (b"\x1f\x8b", "gzip"), (b"PK\x03\x04", "ZIP"), (b"<svg", "SVG"), (b"<?xml", "XML"), (b"<!DOCTYPE", "HTML"),
    (b"<!doctype", "HTML"),
    (b"<html", "HTML"), (b"P1", "PNM"), (b"P2", "PNM"), (b"P3", "PNM"), (b"P4", "PNM"), (b"P5", "PNM"), (b"P6", "PNM"),
)  # fmt: skip

_BRANDS: Final = {
    **dict.fromkeys((b"avif", b"avis", b"avio"), "AVIF"),
    **dict.fromkeys((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"), "HEIC"),
    **dict.fromkeys((b"mif1", b"mif2", b"msf1"), "HEIF"),
    b"jp2 ": "JPEG 2000", b"jxl ": "JPEG XL", b"crx ": "CR3", b"qt  ": "QuickTime", b"M4A ": "MPEG-4 audio",
}  # fmt: skip
"""Formats in the container of ISO/IEC 14496-12, by the brand in its first box. All other brands are videos."""

_VIDEOS: Final = ("MP4", "QuickTime", "Matroska")

_BMP_HEADERS: Final = frozenset(size.to_bytes(4, "little") for size in (12, 16, 40, 52, 56, 64, 108, 124))
"""Possible sizes of a BMP's second header, stored in bytes 14 to 18."""


def find_format(data: bytes) -> ImageFormat:
    """Return the format of an encoded image.

    Raises:
        UnsupportedMedia: It has another format, which the message names if it is known.
        UnusableMedia: There are no bytes.
    """
    if not data:
        raise UnusableMedia("The image is empty: it has 0 bytes.")
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "WebP"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    # Many texts begin with "BM", too. Bytes 6 to 10 are reserved, but some programs write there.
    if data.startswith(b"BM") and (data[6:10] == b"\0\0\0\0" or data[14:18] in _BMP_HEADERS):
        return "BMP"
    found = _unsupported(data)
    raise UnsupportedMedia(
        f"The image is {f'in the format {found}' if found else 'in no known format'}: "
        f"it must be {', '.join(FORMATS[:-1])} or {FORMATS[-1]}."
        f"{' Send a video as a video, such as `video_url`.' if found in _VIDEOS else ''}"
    )


def _unsupported(data: bytes) -> str | None:
    if data[4:8] == b"ftyp":
        found = _BRANDS.get(data[8:12], "MP4")
        return "AVIF" if found == "HEIF" and b"avif" in data[16 : int.from_bytes(data[:4], "big")] else found
    if data.startswith(_CURSOR) and data[4:6] == b"\0\0":  # without a cursor it is a TGA, or unknown
        return None
    text = data[:64].lstrip(b"\xef\xbb\xbf \t\r\n")
    return next((name for beginning, name in _OTHERS if data.startswith(beginning) or text.startswith(beginning)), None)
