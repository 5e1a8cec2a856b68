"""Sources of GeoTIFFs: URLs, files and base64, all within the settings of the server.

URLs and paths in `data` are the caller's. So they are fetched under the server's own rules (`PluginSetup.fetch`): it
keeps to `--allow-media-domain` and `--allow-media-path`, checks every address and redirect, and counts bytes as they
arrive.
"""

from __future__ import annotations

import binascii
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import PurePosixPath

import anyio
import anyio.to_thread
import pybase64

from geo_segmentation.faults import fault
from geo_segmentation.request import SegmentationRequest
from staged_pool import InvalidInput, MediaUnavailable, TooLarge


class Sources:
    """Gets the bytes of GeoTIFFs.

    Args:
        fetch: Fetches a URL under the server's rules.
        max_bytes: Largest size of a GeoTIFF in base64, decoded.
    """

    def __init__(self, fetch: Callable[[str], Awaitable[bytes]], max_bytes: int) -> None:
        self._fetch = fetch
        self._max_bytes = max_bytes

    async def get(self, request: SegmentationRequest) -> tuple[bytes, ...]:
        """Get all sources of a request, several at once. The first failure ends the others.

        Raises:
            InvalidInput: A source is malformed, not allowed, too large, or does not exist.
            MediaUnavailable: A host failed; the same request may succeed later.
        """
        files: dict[int, bytes] = {}
        failures: list[InvalidInput | MediaUnavailable] = []

        async with anyio.create_task_group() as tasks:

            async def get(index: int) -> None:
                try:
                    files[index] = await self._get(request, index)
                except (InvalidInput, MediaUnavailable) as failure:
                    failures.append(failure)
                    tasks.cancel_scope.cancel()

            for index in range(len(request.sources)):
                tasks.start_soon(get, index)
        if failures:
            raise failures[0]
        return tuple(files[index] for index in range(len(request.sources)))

    async def _get(self, request: SegmentationRequest, index: int) -> bytes:
        source, place = request.sources[index], request.place(index)
        if request.format == "b64_json":
            return await anyio.to_thread.run_sync(partial(_decoded, source, place, self._max_bytes))
        url = PurePosixPath(source).as_uri() if request.format == "path" else source
        try:
            return await self._fetch(url)
        except InvalidInput as error:
            raise type(error)(f"{place}: {error}", param=place) from None
        except MediaUnavailable as error:
            raise type(error)(f"{place}: {error}") from None


def _decoded(text: str, place: str, max_bytes: int) -> bytes:
    if len(text) * 3 // 4 > max_bytes + 2:
        raise fault(place, f"is larger than this server's limit of {max_bytes} bytes", TooLarge)
    try:
        return pybase64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise fault(place, "is no base64, which data_format says that it is") from None
