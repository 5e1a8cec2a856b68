"""Our own parsers, each as a function of bytes that raises `AssertionError` on a fault.

Each may fail with its documented errors only. Where a second reader exists, it must read the same.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import http.client
import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeAlias

import h11

from staged_pool.api.http.protocol.content_coding import DEFLATE, GZIP, _Unpacker
from staged_pool.api.http.protocol.strict_reader import StrictReader
from staged_pool.api.status import HttpError
from staged_pool.api.wire import extract_images, forms, json_bounds
from staged_pool.api.wire.data_urls import decode_base64, decode_data_url
from staged_pool.api.wire.dialects import openai, pooling, score, tei, tei_predict
from staged_pool.api.wire.exchange import Exchange
from staged_pool.api.wire.image_count import count_images
from staged_pool.client.exchange import NDJSON, ServerAnswer
from staged_pool.client.streaming import VectorLines
from staged_pool.runtime.input_ranges import InputRange
from staged_pool.runtime.media.urls import FileUrl, WebUrl, read_url
from staged_pool.runtime.models.images.decode import Encoded, ImageLimits
from staged_pool.runtime.models.images.jpeg import MAX_SEGMENTS, decodable, read_structure
from staged_pool.runtime.models.images.orientation import read_orientation
from staged_pool.stages.errors import StagedPoolError, TooLarge, UnusableMedia
from tests.support.cards import CARD

Target: TypeAlias = Callable[[bytes], None]
MOST_UNPACKED: Final = 2**20
"""Bytes that a compressed body may become here."""


def http_head(data: bytes) -> None:
    """A request reads the same whole and in pieces, and as the standard library does."""
    if not data:
        return
    cut, data = data[0], data[1:]
    whole = _events([data])
    assert whole == _events([data[:cut], *(data[first : first + 7] for first in range(cut, len(data), 7))])
    for event in whole:
        if isinstance(event, h11.Request):
            head = data[data.find(b"\r\n", len(data) - len(data.lstrip(b"\r\n"))) + 2 :]
            theirs = http.client.parse_headers(io.BytesIO(head.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"))
            said = [(name.lower().encode(), value.strip(" \t").encode("latin-1")) for name, value in theirs.items()]
            said = [(name, value.lower() if name == b"transfer-encoding" else value) for name, value in said]
            assert said == list(event.headers), (said, list(event.headers))
            break


def _events(pieces: list[bytes]) -> list[object]:
    """Return the events of a first request, and the class of an error."""
    reader = StrictReader(4096, 2**16)
    found: list[object] = []
    body = b""
    for piece in pieces:
        if piece:
            reader.receive_data(piece)
        while True:
            try:
                event = reader.next_event()
            except h11.RemoteProtocolError:
                return [*found, body, "wrong"]
            if event is h11.NEED_DATA or event is h11.PAUSED:
                break
            if isinstance(event, h11.Data):
                body += event.data
                continue
            found.append(event)
            if isinstance(event, h11.EndOfMessage):
                return [*found, body]
    return [*found, body]


def form(data: bytes) -> None:
    """A form is read or rejected; and one that is made of parts has these parts."""
    limits = json_bounds.BodyLimits(items=10, tokens=10_000)
    with suppress(StagedPoolError):
        found = forms.read_form(data, b"b", limits)
        json.loads(found.json)
        assert len(found.json) <= 8 * len(data) + 100 * forms.MAX_PARTS
        assert sum(map(len, found._held.values())) <= len(data)
    parts = data.split(b"|")[:10]
    if any(b"\r\n--b" in b"\r\n" + part for part in parts):
        return
    head = b'content-disposition: form-data; name="file"; filename="f"\r\n\r\n'
    made = b"".join(b"--b\r\n" + head + part + b"\r\n" for part in parts) + b"--b--\r\n"
    assert list(forms.read_form(made, b"b")._held.values()) == parts


def data_url(data: bytes) -> None:
    """Decoded data is no longer than its URL; flawless base64 equals the standard library's."""
    for in_lines in (False, True):
        found = decode_data_url(memoryview(b"data:" + data), in_lines=in_lines)
        assert found is None or len(found) <= len(data)
    for in_lines in (False, True):
        assert decode_data_url(memoryview(b"data:;base64," + base64.b64encode(data)), in_lines=in_lines) == data
    with suppress(binascii.Error):
        theirs = base64.b64decode(data, validate=True)
        if not data.endswith(b"==="):  # which the standard library lets pass
            assert decode_base64(memoryview(data), in_lines=False) == theirs


def extracted(data: bytes) -> None:
    """JSON with extracted images put back equals the JSON that came, except for line ends."""
    with _patched(extract_images, BLOCK=16, SLICE=64):
        found = extract_images.extract(data)
        assert len(found.json) <= len(data) + 64 * len(found._held)
    try:
        whole = json.loads(data)
    except (ValueError, RecursionError):
        return
    marked = json.loads(found.json)
    held = {mark: bytes(value).decode() for mark, value in found._held.items()}
    assert _put_back(marked, held) == whole


def _put_back(value: Any, held: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return _Text(held[value]) if value in held else value
    if isinstance(value, list):
        return [_put_back(each, held) for each in value]
    if isinstance(value, dict):
        return {_put_back(name, held): _put_back(each, held) for name, each in value.items()}
    return value


class _Text(str):
    """Base64 joined from lines."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and str(self) == other.replace("\n", "").replace("\r", "")

    __hash__ = str.__hash__


def values(data: bytes) -> None:
    """The count of values equals that of a reader that goes character by character."""
    inside = escaped = False
    marks = numbers = digits = most_digits = 0
    for place, byte in enumerate(data):
        character = bytes([byte])
        if inside:
            inside = escaped or character != b'"'
            escaped = not escaped and character == b"\\"
            digits = 0
            continue
        escaped = character == b"\\"  # which no JSON has here
        if character == b'"' and not (place and _is_escaped(data, place)):
            inside = True
        after_digit = place > 0 and data[place - 1 : place].isdigit()
        numbers += character == b"," and after_digit
        marks += character in (b":", b"[", b"{") or (character == b"," and not after_digit)
        digits = digits + 1 if character.isdigit() else 0
        most_digits = max(most_digits, digits)
    limits = json_bounds.BodyLimits(items=0, tokens=0)
    with _patched(json_bounds, SLICE=11, LEAST_VALUES=marks):
        for tokens in (numbers, numbers - 1):
            try:
                json_bounds.check_bounds(data, json_bounds.BodyLimits(items=0, tokens=tokens))
            except TooLarge:
                assert tokens < numbers
            except StagedPoolError:
                assert most_digits > json_bounds.MAX_DIGITS
            else:
                assert tokens >= numbers or json_bounds.is_small(data, limits)


def _is_escaped(data: bytes, place: int) -> bool:
    before = data[:place]
    return (len(before) - len(before.rstrip(b"\\"))) % 2 == 1


_READERS: Final[tuple[Any, ...]] = (
    openai.read_embeddings, pooling.read_pooling, score.read_score,
    tei.read_similarity, tei_predict.read_predict, tei.read_embed,
)  # fmt: skip


def request(data: bytes) -> None:
    """A request is read or rejected by each dialect; the standard library must read an accepted one as JSON, too."""
    for reader in _READERS:
        settings: dict[str, Any] = {"auto_truncate": True} if reader in _READERS[3:] else {}
        settings |= {"output": CARD.outputs[0]} if reader is tei.read_embed else {}

        def read(body: Any, card: Any, reader: Any = reader, settings: Any = settings) -> Any:
            return reader(body, card, **settings)

        with suppress(StagedPoolError):
            Exchange(read, data, CARD, "r", json_bounds.BodyLimits(items=100, tokens=10_000)).decode()
            with suppress(RecursionError):
                json.loads(data.decode(errors="replace"))  # an ignored field may hold invalid UTF-8


def images_shown(data: bytes) -> None:
    """Counting of images does not fail on any body."""
    for content_type in (b"", b"multipart/form-data; boundary=b", b"multipart/form-data"):
        for only_images in (False, True):
            found = count_images(data, content_type, only_images=only_images)
            assert found is None or 0 <= found <= len(data)


def image(data: bytes) -> None:
    """An image's header is read, or rejected as invalid."""
    with suppress(TooLarge, UnusableMedia, *_MEDIA):
        encoded = Encoded(data, ImageLimits(image_bytes=2**20, pixels=2**16))
        assert encoded.memory >= 0
    if data.startswith(b"\xff\xd8"):
        structure = read_structure(data)
        assert structure.segments <= MAX_SEGMENTS + 1
        ends = [place for part in structure.read for place in part]
        assert ends == sorted(ends)
        assert not ends or ends[-1] <= len(data)
        assert len(decodable(data, structure)) <= len(data)


def orientation(data: bytes) -> None:
    """An orientation is a whole number, wherever it stands."""
    text = data.decode("latin-1")
    for info in ({"exif": data}, {"xmp": data}, {"Raw profile type exif": text}, {"XML:com.adobe.xmp": text}):
        assert isinstance(read_orientation(info), int)


def lines(data: bytes) -> None:
    """An answer in lines reads the same in one piece and byte by byte."""
    assert _vectors([data]) == _vectors([data[place : place + 1] for place in range(len(data))])


def _vectors(pieces: list[bytes]) -> object:
    reader = VectorLines(ServerAnswer(200, {"content-type": NDJSON}), InputRange(0, 3), 3)
    found: list[tuple[int, bytes]] = []
    try:
        for piece in pieces:
            found += [(index, vector.tobytes()) for index, vector in reader.feed(piece)]
        found += [(index, vector.tobytes()) for index, vector in reader.end()]
    except StagedPoolError as error:
        return type(error)
    return found


def coding(data: bytes) -> None:
    """A compressed body unpacks as in the standard library, a bounded piece at a time."""
    if not data:
        return
    for name, packed in ((GZIP, data), (DEFLATE, data), (GZIP, gzip.compress(data)), (DEFLATE, zlib.compress(data))):
        unpacker = _Unpacker(packed, name)
        found = b""
        try:
            while not unpacker.ended and len(found) < MOST_UNPACKED:
                piece = unpacker.unpack(1000)
                assert len(piece) <= 1000
                found += piece
        except HttpError:
            assert packed is data
            continue
        if packed is not data:
            assert found == data
        elif unpacker.ended and name is GZIP:
            assert gzip.decompress(packed) == found


def url(data: bytes) -> None:
    """A URL is rejected, or the request to its host has legal characters only."""
    with suppress(StagedPoolError):
        found = read_url(data.decode("utf-8", "replace"))
        if isinstance(found, WebUrl):
            for part in (found.host, found.target, found.authority):
                assert part.isascii()
                assert not any(character <= " " or character == "\x7f" for character in part)
            assert 0 < found.port < 2**16
        else:
            assert isinstance(found, FileUrl)
            assert found.path.startswith("/")
            assert "\0" not in found.path


@contextmanager
def _patched(module: Any, **others: int) -> Iterator[None]:
    """Shrink the sizes of a module for a while, so that small inputs cross them."""
    before = {name: getattr(module, name) for name in others}
    for name, value in others.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


_MEDIA: Final[tuple[type[Exception], ...]] = tuple(StagedPoolError.__subclasses__())

TARGETS: Final[Mapping[str, Target]] = {
    target.__name__: target
    for target in (
        http_head, form, data_url, extracted, values, request, images_shown, image, orientation, lines, coding, url,
    )
}  # fmt: skip
