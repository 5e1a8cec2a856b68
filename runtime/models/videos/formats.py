"""Container of an encoded video, by its first bytes: FFmpeg never has to guess.

FFmpeg reads playlists too, and those name files and hosts. So only these formats reach it.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

from staged_pool.stages.errors import UnsupportedMedia, UnusableMedia

Demuxer: TypeAlias = Literal["mov", "matroska", "gif"]
"""FFmpeg's name of a format: MP4 and MOV, WebM and Matroska, or GIF."""

FORMATS: Final = ("MP4", "MOV", "WebM", "GIF")
"""Supported formats."""

_BOXES: Final = frozenset({b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot"})
"""First boxes of MP4 and QuickTime files (ISO/IEC 14496-12)."""
_IMAGE_BRANDS: Final = frozenset(
    {b"avif", b"avis", b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1", b"crx "}
)
_EBML: Final = b"\x1aE\xdf\xa3"
_DOC_TYPES: Final = (b"\x42\x82\x84webm", b"\x42\x82\x88matroska")
"""The element DocType with its length and value (RFC 8794)."""
_HEAD_BYTES: Final = 64

_OTHERS: Final = (
    (b"#EXTM3U", "an HLS playlist"), (b"ffconcat", "an FFmpeg playlist"), (b"<?xml", "XML"),
    (b"<MPD", "a DASH manifest"),
    (b"<html", "HTML"), (b"<!DOCTYPE", "HTML"), (b"RIFF", "RIFF"), (b"FLV", "Flash video"), (b"OggS", "Ogg"),
    (b"\x00\x00\x01\xba", "MPEG-PS"), (b"\x00\x00\x01\xb3", "MPEG video"), (b"0&\xb2u", "ASF"), (b"ID3", "MP3"),
    (b"\xff\xd8\xff", "JPEG, an image"), (b"\x89PNG", "PNG, an image"), (b"%PDF-", "PDF"), (b"PK\x03\x04", "ZIP"),
    (b"\x1f\x8b", "gzip"),
)  # fmt: skip
_RIFF: Final = {b"AVI ": "AVI", b"WAVE": "WAV, which is sound", b"WEBP": "WebP, an image"}
"""Formats in the container RIFF, by bytes 8 to 12."""
_ANIMATED: Final = 0x02
"""Flag in byte 20 of a WebP that begins with a chunk VP8X."""
_IMAGE_HINT: Final = " Send an image as an image, such as `image_url`; of an animation, the first frame is read."
_PACKET_BYTES: Final = 188
"""Bytes of a packet of MPEG-TS, each of which begins with 0x47."""


def find_demuxer(data: bytes) -> Demuxer:
    """Return the format of an encoded video.

    Raises:
        UnsupportedMedia: It has another format, which the message names if it is known.
        UnusableMedia: There are no bytes.
    """
    if not data:
        raise UnusableMedia("The video is empty: it has 0 bytes.")
    kind, brand = data[4:8], data[8:12]
    if kind in _BOXES and not (kind == b"ftyp" and brand in _IMAGE_BRANDS):
        return "mov"
    if data.startswith(_EBML) and any(name in data[:_HEAD_BYTES] for name in _DOC_TYPES):
        return "matroska"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "gif"
    found = _other(data)
    raise UnsupportedMedia(
        f"The video is {f'in the format {found}' if found else 'in no known format'}: "
        f"it must be {', '.join(FORMATS[:-1])} or {FORMATS[-1]}."
        f"{_IMAGE_HINT if found is not None and found.endswith('an image') else ''}"
    )


def _other(data: bytes) -> str | None:
    if data[4:8] == b"ftyp":
        return "AVIF or HEIC, an image"
    if data[0] == 0x47 and data[_PACKET_BYTES : _PACKET_BYTES + 1] == b"\x47":
        return "MPEG-TS"
    if data.startswith(b"RIFF") and data[8:12] in _RIFF:
        is_animated = data[8:16] == b"WEBPVP8X" and len(data) > 20 and data[20] & _ANIMATED
        return "animated WebP, an image" if is_animated else _RIFF[data[8:12]]
    text = data[:_HEAD_BYTES].lstrip(b"\xef\xbb\xbf \t\r\n")
    return next((name for beginning, name in _OTHERS if data.startswith(beginning) or text.startswith(beginning)), None)
