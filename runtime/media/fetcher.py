"""Fetcher of images and videos by their URLs, within the limits of the settings.

The server sends requests to URLs that strangers choose, from inside its own network: the danger is server-side request
forgery. Four rules prevent it:

- Nothing is fetched from hosts that the settings do not allow.
- Every address is checked before a connection is opened.
- A redirect is checked like the first URL.
- A request has no cookie and no credential, and uses no proxy.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urljoin

import anyio
import anyio.lowlevel
import anyio.to_thread

from staged_pool.runtime.allowed_hosts import AllowedHosts
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.media import unpacking
from staged_pool.runtime.media.dns import Resolve, resolve
from staged_pool.runtime.media.file_reads import FileReads
from staged_pool.runtime.media.files import read_file, too_large
from staged_pool.runtime.media.http_get import raw_chunks, send_get
from staged_pool.runtime.media.urls import URL_PARAM, FileUrl, Scheme, WebUrl, read_url, url_not_allowed
from staged_pool.runtime.network_addresses import literal
from staged_pool.runtime.requests import Image, Video
from staged_pool.stages.errors import InvalidInput, MediaTimedOut, MediaUnavailable, StagedPoolError, UnusableMedia

if TYPE_CHECKING:
    import httpx

MAX_REDIRECTS: Final = 3

FREE_CHUNKS: Final = 1024
CHUNK_BYTES: Final = 256
"""Limit of chunks of a body: 1024, and one more for each 256 bytes.

A chunk costs the event loop as much time as kilobytes."""

_OK: Final = 200
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_RETRYABLE: Final = frozenset({408, 425, 429})
_NEEDS_CREDENTIALS: Final = frozenset({401, 403, 407})
"""Statuses of hosts that ask for credentials. They do not tell if the image exists."""

_WITHOUT_CONTENT: Final = frozenset({204, 205})
_PARTIAL: Final = 206
_WHOLE: Final = re.compile(r"bytes 0-(\d{1,18})/(\d{1,18})")
"""`Content-Range` of a part that may be the whole: its last byte, and the length of the file."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Kind of file that is fetched."""

    accept: str
    """Value of the header `Accept`."""
    max_bytes: int


class MediaFetcher:
    """Fetches images in the tasks of its callers, at most `config.media_limit` at once.

    It keeps no connection open, so there is nothing to close.

    Args:
        config: Allowed hosts and folder, and limits of size and time.
        find: A function that resolves hosts.
        trust: A function that returns the settings of TLS. It is called once, in a thread: it reads the certificates.
        read: A function that reads a file, see `read_file`.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        find: Resolve = resolve,
        trust: Callable[[], ssl.SSLContext] = ssl.create_default_context,
        read: Callable[[Path, str, int], bytes] = read_file,
    ) -> None:
        self._hosts = AllowedHosts.of(config.allow_media_domains)
        self._folder = None if config.allow_media_path is None else Path(config.allow_media_path)
        self._image = _Wanted("image/*", config.max_image_bytes)
        self._video = _Wanted("video/*", config.max_video_bytes)
        self._timeout_s = config.media_timeout_s
        self._limiter = anyio.CapacityLimiter(config.media_limit)
        self._reads = FileReads(config.media_limit, config.media_timeout_s)
        self._read_file = read
        self._unpackers = anyio.CapacityLimiter(1)
        self._find = find
        self._trust = trust
        self._tls: ssl.SSLContext | None = None
        self._no_tls: ssl.SSLContext | None = None

    async def fetch(self, image: Image) -> Image:
        """Fetch an image, and return it with its bytes. An image that has bytes is returned unchanged.

        Cancellation closes the connection, and abandons the thread that reads a file.

        Raises:
            InvalidInput: The URL is malformed.
            UrlNotAllowed: The settings do not allow the URL.
            TooLarge: It has more than `config.max_image_bytes`, or `config.max_video_bytes` for a video.
            UnusableMedia: The host has no such image, or redirects too often.
            MediaUnavailable: The host cannot be found or reached, fails, or asks for credentials; or the disk of a file
                does not answer.
            MediaTimedOut: Fetching took longer than `config.media_timeout_s`.
        """
        if not isinstance(image.source, str):
            return image
        if not isinstance(image, Video):
            return replace(image, source=await self._fetch(image.source, self._image))
        try:
            return replace(image, source=await self._fetch(image.source, self._video))
        except (InvalidInput, MediaUnavailable) as error:
            raise of_video(error) from error

    async def _fetch(self, source: str, wanted: _Wanted) -> bytes:
        url = read_url(source)
        if isinstance(url, FileUrl):
            return await self._read(url, wanted.max_bytes)
        self._check_host(url)  # before it takes a slot
        async with self._limiter:
            with anyio.move_on_after(self._timeout_s):
                return await self._download(url, wanted)
        raise MediaTimedOut(f"The host of the image did not send it within {self._timeout_s:g} s.")

    async def _read(self, url: FileUrl, max_bytes: int) -> bytes:
        folder = self._folder
        if folder is None:
            raise url_not_allowed("names a file, and this server reads no files")
        return await self._reads.run(partial(self._read_file, folder, url.path, max_bytes))

    def _check_host(self, url: WebUrl) -> None:
        if not self._hosts:
            raise url_not_allowed("is not followed: this server fetches nothing; send the image itself")
        if not self._hosts.allow(url.host):
            raise url_not_allowed("leads to a host that this server does not fetch from")

    async def _download(self, url: WebUrl, wanted: _Wanted) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            found = await self._get(url, await self._addresses(url), wanted)
            if isinstance(found, bytes):
                return found
            url = self._redirected(url, found)
        message = f"The host of the image redirects more than {MAX_REDIRECTS} times."
        raise UnusableMedia(message, param=URL_PARAM)

    async def _addresses(self, url: WebUrl) -> Sequence[str]:
        """Resolve a host, and reject it if any of its addresses is not allowed."""
        if literal(url.host) is not None:
            return (url.host,)  # `_check_host` has checked it
        try:
            found = await self._find(url.host, url.port)
        except OSError:
            found = ()
        if not found:
            raise MediaUnavailable("The host of the image could not be found.")
        if not all(map(self._hosts.may_dial, found)):
            raise url_not_allowed("leads to an address that is not public")
        return found

    def _redirected(self, url: WebUrl, target: str) -> WebUrl:
        # Browsers and curl write a blank in this way, too. Around the target, HTTP allows it.
        target = target.strip(" \t").replace(" ", "%20")
        there = read_url(urljoin(f"{url.scheme}://{url.authority}{url.target}", target))
        if isinstance(there, FileUrl):
            raise url_not_allowed("redirects to a file")
        if url.scheme == "https" and there.scheme == "http":
            raise url_not_allowed("redirects from https to http")
        self._check_host(there)
        return there

    async def _get(self, url: WebUrl, addresses: Sequence[str], wanted: _Wanted) -> bytes | str:
        """Get the bytes of an image, or the target of a redirect."""
        tls = await self._tls_settings(url.scheme)
        import httpx  # `_tls_settings` has imported it in a thread

        try:
            async with send_get(url, addresses, tls, accept=wanted.accept) as response:
                if response.status_code in _REDIRECTS and (location := _first(response, "location")):
                    return location
                _check(response, wanted.max_bytes)
                codings = unpacking.codings(response.headers.get_list("content-encoding"))
                body = await _body(response, wanted.max_bytes)
            if not body and response.status_code != _OK:
                raise _without_image(response.status_code)
            if not codings:
                return body
            return await anyio.to_thread.run_sync(
                partial(unpacking.unpack, body, codings, wanted.max_bytes),
                abandon_on_cancel=True,
                limiter=self._unpackers,
            )
        except (httpx.TransportError, OSError):
            raise MediaUnavailable("The host of the image could not be reached, or the connection broke.") from None

    async def _tls_settings(self, scheme: Scheme) -> ssl.SSLContext:
        """Return the settings of TLS. For http, they are unused and trust no certificate."""
        if self._no_tls is None:
            self._no_tls = await anyio.to_thread.run_sync(_import_client)
        if scheme == "http":
            return self._no_tls
        if self._tls is None:
            self._tls = await anyio.to_thread.run_sync(self._trust)
        return self._tls


def _import_client() -> ssl.SSLContext:
    """Import httpx in a thread: that takes a tenth of a second."""
    import httpcore  # noqa: F401  # httpx imports it with its first client
    import httpx  # noqa: F401

    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _first(response: httpx.Response, name: str) -> str:
    """Return the first header of a name, or an empty string."""
    return next(iter(response.headers.get_list(name)), "")


def _check(response: httpx.Response, max_bytes: int) -> None:
    """Reject a response by its status and headers."""
    status = response.status_code
    if status >= 500 or status in _RETRYABLE or status in _NEEDS_CREDENTIALS:
        raise MediaUnavailable(f"The host of the image answered with status {status}.")
    if not 200 <= status < 300 or status in _WITHOUT_CONTENT or (status == _PARTIAL and not _is_whole(response)):
        raise _without_image(status)
    length = _first(response, "content-length")
    if length.isdigit() and int(length) > max_bytes:
        raise too_large(max_bytes)


def _is_whole(response: httpx.Response) -> bool:
    """Return True if a partial answer has all bytes: some hosts send that unasked."""
    found = _WHOLE.fullmatch(_first(response, "content-range").strip().lower())
    return found is not None and int(found[1]) + 1 == int(found[2])


def _without_image(status: int) -> UnusableMedia:
    return UnusableMedia(f"The host of the image answered with status {status}.", param=URL_PARAM)


async def _body(response: httpx.Response, max_bytes: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async with raw_chunks(response) as arriving:
        async for chunk in arriving:
            await anyio.lowlevel.checkpoint()  # chunks that arrived together come without one
            size += len(chunk)
            if size > max_bytes:
                raise too_large(max_bytes)
            if len(chunks) > FREE_CHUNKS + size // CHUNK_BYTES:
                raise MediaUnavailable("The host of the image sent it in too many pieces.")
            chunks.append(chunk)
    return b"".join(chunks)


def of_video(error: InvalidInput | MediaUnavailable) -> StagedPoolError:
    """Return the error of a fetch with the words for a video."""
    message = str(error).replace("the image", "the video").replace("The image", "The video")
    if isinstance(error, InvalidInput):
        return type(error)(message, param="video_url" if error.param == URL_PARAM else error.param, index=error.index)
    return type(error)(message, index=error.index)
