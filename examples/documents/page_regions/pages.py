"""Pages: images and PDFs, fetched under the server's rules, decoded and rendered within limits.

A page that cannot be fetched or decoded fails alone: its entry in the answer has an error in place of regions.
"""

from __future__ import annotations

import binascii
import math
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import anyio
import anyio.to_thread
import pybase64
import pypdfium2
from PIL import Image

from staged_pool import EngineConfig, InvalidInput, MediaUnavailable, StagedPoolError, TooLarge, UnusableMedia
from staged_pool.runtime.models.images.decode import Encoded, ImageLimits

MAX_PAGES: Final = 64
"""Most pages of one PDF."""

DOTS_PER_INCH: Final = 150
"""Resolution of pages of PDFs, which have 72 points per inch."""

_PDF: Final = b"%PDF-"
_PDFIUM: Final = threading.Lock()
"""Lock of PDFium. It must not run in two threads at once, not even on two documents."""


@dataclass(frozen=True, slots=True)
class Page:
    """One page, or the reason that there is none."""

    source: int
    """Index in the request."""
    number: int
    """Number in its PDF, from 0."""
    image: Image.Image | StagedPoolError


class PageReader:
    """Fetches and decodes pages.

    Args:
        fetch: Fetches a URL under the server's rules.
        config: Limits: `max_image_bytes` of a file, and `max_image_pixels` of a page.
    """

    def __init__(self, fetch: Callable[[str], Awaitable[bytes]], config: EngineConfig) -> None:
        self._fetch = fetch
        self._limits = ImageLimits(config.max_image_bytes, config.max_image_pixels)

    async def fetch(self, sources: tuple[str, ...]) -> tuple[bytes | StagedPoolError, ...]:
        """Fetch all sources, several at once. Returns the bytes of each, or its error."""
        fetched: dict[int, bytes | StagedPoolError] = {}

        async def fetch(index: int) -> None:
            try:
                fetched[index] = await self._fetch_one(sources[index])
            except (InvalidInput, MediaUnavailable) as error:
                fetched[index] = error.with_traceback(None)

        async with anyio.create_task_group() as tasks:
            for index in range(len(sources)):
                tasks.start_soon(fetch, index)
        return tuple(fetched[index] for index in range(len(sources)))

    def decode(self, fetched: tuple[bytes | StagedPoolError, ...]) -> Iterator[Page]:
        """Yield the pages of all sources in order, one decoded page at a time. Blocks: call it in a thread."""
        for source, data in enumerate(fetched):
            if isinstance(data, StagedPoolError):
                yield Page(source, 0, data)
            elif data.startswith(_PDF):
                yield from self._pdf_pages(source, data)
            else:
                yield Page(source, 0, _tried(partial(self._image, data)))

    async def _fetch_one(self, url: str) -> bytes:
        if url[:5].lower() != "data:":
            return await self._fetch(url)
        return await anyio.to_thread.run_sync(partial(_data_url, url, self._limits.image_bytes))

    def _image(self, data: bytes) -> Image.Image:
        return Encoded(data, self._limits).decode()

    def _pdf_pages(self, source: int, data: bytes) -> Iterator[Page]:
        try:
            with _PDFIUM:
                document = pypdfium2.PdfDocument(data)
                count = len(document)
        except pypdfium2.PdfiumError:
            message = "The PDF cannot be opened: it is damaged, or needs a password."
            yield Page(source, 0, UnusableMedia(message))
            return
        try:
            if count > MAX_PAGES:
                yield Page(source, 0, TooLarge(f"The PDF has {count} pages: at most {MAX_PAGES} are read."))
                return
            for number in range(count):
                yield Page(source, number, _tried(partial(self._rendered, document, number)))
        finally:
            with _PDFIUM:
                document.close()

    def _rendered(self, document: pypdfium2.PdfDocument, number: int) -> Image.Image:
        try:
            with _PDFIUM:
                page = document[number]
                try:
                    width, height = (math.ceil(points * DOTS_PER_INCH / 72) for points in page.get_size())
                    if not 1 <= width * height <= self._limits.pixels:
                        raise TooLarge(
                            f"The page of the PDF has {width} x {height} pixels at {DOTS_PER_INCH} dots per inch: "
                            f"it must have 1 to {self._limits.pixels} in all."
                        )
                    bitmap = page.render(scale=DOTS_PER_INCH / 72)
                    image: Image.Image = bitmap.to_pil().convert("RGB")
                    bitmap.close()
                finally:
                    page.close()
        except pypdfium2.PdfiumError:
            raise UnusableMedia("The page of the PDF is damaged.") from None
        return image


def _tried(decode: Callable[[], Image.Image]) -> Image.Image | StagedPoolError:
    try:
        return decode()
    except InvalidInput as error:
        return error.with_traceback(None)


def _data_url(url: str, max_bytes: int) -> bytes:
    head, comma, body = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InvalidInput("The data: URL is not in base64, as in data:image/png;base64,iVBORw0….")
    if len(body) * 3 // 4 > max_bytes + 2:
        raise TooLarge(f"The page is larger than this server's limit of {max_bytes} bytes.")
    try:
        return pybase64.b64decode(body, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidInput("The data: URL has characters that are no base64.") from None
