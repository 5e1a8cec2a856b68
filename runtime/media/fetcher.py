"""Fetching the images that requests name by URLs, within the limits that the settings give.

What a stranger names, this server asks, from its place in the network: for a server in a private network that is a way
in (server-side request forgery). So nothing is fetched unless the settings say from where, every address is checked
before it is dialled, a redirect is checked as if it were the first URL, and nothing of this server goes with a request:
no cookie, no credential, no proxy.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from dataclasses import replace
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
from staged_pool.runtime.media.http_get import asked, whole
from staged_pool.runtime.media.urls import PARAM, FileUrl, Scheme, WebUrl, read_url, refused
from staged_pool.runtime.network_addresses import literal
from staged_pool.runtime.requests import Image
from staged_pool.stages.errors import MediaTimedOut, MediaUnavailable, UnusableMedia

if TYPE_CHECKING:
    import httpx

MAX_REDIRECTS: Final = 3

FREE_PIECES: Final = 1024
PIECE_BYTES: Final = 256
"""An image may come in 1024 pieces and one more for each 256 bytes: each costs the event loop as much as kilobytes."""

_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_TRY_AGAIN: Final = frozenset({408, 425, 429})
_WANTS_CREDENTIALS: Final = frozenset({401, 403, 407})
"""Of these nobody but the host knows whether there is such an image, and who else would be given it."""


class MediaFetcher:
    """Fetches images, `config.media_limit` at once; each in the task of its caller.

    It keeps no connection, so there is nothing to close.

    Args:
        config: Says what may be fetched, how large it may be and how long it may take.
        find: Looks hosts up.
        trust: Makes the settings of TLS, once and in a thread: it reads the certificates of those that are trusted.
        read: FileReads a file, see `read_file`.
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
        self._max_bytes = config.max_image_bytes
        self._timeout_s = config.media_timeout_s
        self._limiter = anyio.CapacityLimiter(config.media_limit)
        self._reads = FileReads(config.media_limit, config.media_timeout_s)
        self._read_file = read
        self._unpackers = anyio.CapacityLimiter(1)
        self._find = find
        self._trust = trust
        self._tls: ssl.SSLContext | None = None
        self._nobody: ssl.SSLContext | None = None

    async def fetch(self, image: Image) -> Image:
        """The same image with its bytes. One that has them is returned as it is.

        Cancellation closes the connection, and leaves a file to the thread that reads it.

        Raises:
            InvalidInput: Its URL is wrong.
            UrlNotAllowed: It leads where the settings do not allow it.
            TooLarge: It has more than `config.max_image_bytes`.
            UnusableMedia: The host says that there is no such image, or sends the way round in circles.
            MediaUnavailable: The host cannot be found or reached, fails, or wants to know who asks; or the disk of a
                file does not answer.
            MediaTimedOut: It is not here after `config.media_timeout_s`.
        """
        if not isinstance(image.source, str):
            return image
        url = read_url(image.source)
        if isinstance(url, FileUrl):
            return replace(image, source=await self._read(url))
        self._check_host(url)  # before it takes the place of another one
        async with self._limiter:
            with anyio.move_on_after(self._timeout_s):
                return replace(image, source=await self._download(url))
        raise MediaTimedOut(f"The host of the image did not send it within {self._timeout_s:g} s.")

    async def _read(self, url: FileUrl) -> bytes:
        folder = self._folder
        if folder is None:
            raise refused("names a file, and this server opens none")
        return await self._reads.run(partial(self._read_file, folder, url.path, self._max_bytes))

    def _check_host(self, url: WebUrl) -> None:
        if not self._hosts:
            raise refused("is not followed: this server fetches nothing; send the image itself")
        if not self._hosts.allow(url.host):
            raise refused("leads to a host that this server does not fetch from")

    async def _download(self, url: WebUrl) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            found = await self._ask(url, await self._addresses(url))
            if isinstance(found, bytes):
                return found
            url = self._redirected(url, found)
        message = f"The host of the image redirects more than {MAX_REDIRECTS} times."
        raise UnusableMedia(message, param=PARAM)

    async def _addresses(self, url: WebUrl) -> Sequence[str]:
        """Where the host is, every place checked: one that is not allowed among them is an attempt."""
        if literal(url.host) is not None:
            return (url.host,)  # `_check_host` has seen it
        try:
            found = await self._find(url.host, url.port)
        except OSError:
            found = ()
        if not found:
            raise MediaUnavailable("The host of the image could not be found.")
        if not all(map(self._hosts.may_dial, found)):
            raise refused("leads to an address that is not public")
        return found

    def _redirected(self, url: WebUrl, target: str) -> WebUrl:
        there = read_url(urljoin(f"{url.scheme}://{url.authority}{url.target}", target))
        if isinstance(there, FileUrl):
            raise refused("redirects to a file")
        if url.scheme == "https" and there.scheme == "http":
            raise refused("redirects from https to http")
        self._check_host(there)
        return there

    async def _ask(self, url: WebUrl, addresses: Sequence[str]) -> bytes | str:
        """The image, or where else it is said to be."""
        tls = await self._tls_settings(url.scheme)
        import httpx  # has been imported by now

        try:
            async with asked(url, addresses, tls) as response:
                if response.status_code in _REDIRECTS and (location := _first(response, "location")):
                    return location
                self._check(response)
                codings = unpacking.codings(response.headers.get_list("content-encoding"))
                body = await self._body(response)
            if not codings:
                return body
            return await anyio.to_thread.run_sync(
                partial(unpacking.unpack, body, codings, self._max_bytes),
                abandon_on_cancel=True,
                limiter=self._unpackers,
            )
        except (httpx.TransportError, OSError):
            raise MediaUnavailable("The host of the image could not be reached, or broke off.") from None

    def _check(self, response: httpx.Response) -> None:
        """Refuse what the head of an answer shows to be wrong."""
        status = response.status_code
        if status >= 500 or status in _TRY_AGAIN or status in _WANTS_CREDENTIALS:
            raise MediaUnavailable(f"The host of the image answered with status {status}.")
        if status != 200:
            raise UnusableMedia(f"The host of the image answered with status {status}.", param=PARAM)
        length = _first(response, "content-length")
        if length.isdigit() and int(length) > self._max_bytes:
            raise too_large(self._max_bytes)

    async def _body(self, response: httpx.Response) -> bytes:
        pieces: list[bytes] = []
        size = 0
        async with whole(response) as coming:
            async for piece in coming:
                await anyio.lowlevel.checkpoint()  # what has arrived together is given without one
                size += len(piece)
                if size > self._max_bytes:
                    raise too_large(self._max_bytes)
                if len(pieces) > FREE_PIECES + size // PIECE_BYTES:
                    raise MediaUnavailable("The host of the image sent it in too many pieces.")
                pieces.append(piece)
        return b"".join(pieces)

    async def _tls_settings(self, scheme: Scheme) -> ssl.SSLContext:
        """Whom certificates must be from; in the clear, where nobody looks at them, nobody."""
        if self._nobody is None:
            self._nobody = await anyio.to_thread.run_sync(_import_client)
        if scheme == "http":
            return self._nobody
        if self._tls is None:
            self._tls = await anyio.to_thread.run_sync(self._trust)
        return self._tls


def _import_client() -> ssl.SSLContext:
    """Take what is slow off the event loop: a tenth of a second of reading files."""
    import httpcore  # noqa: F401  # httpx imports it with its first client
    import httpx  # noqa: F401

    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _first(response: httpx.Response, name: str) -> str:
    """The first header of that name; empty where there is none."""
    return next(iter(response.headers.get_list(name)), "")
