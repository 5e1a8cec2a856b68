"""The images of inputs that name some by a URL: fetched before the input is fed to preprocess."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Protocol

import anyio

from staged_pool.runtime.memory.budget import ByteAccount, Holding
from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.requests import Image
from staged_pool.stages.errors import Overloaded, StagedPoolError, StageFailed, TooLarge, UrlNotAllowed
from staged_pool.stages.log import get_logger
from staged_pool.stages.ticket import Item

RETRY_AFTER_S: Final = 1.0
"""Told to clients of a server that holds too much of what it has fetched: about what a fetch takes."""

log = get_logger("staged_pool.engine")


class Fetch(Protocol):
    """Gets the image that a URL names.

    Cancellation ends it at once.

    Raises:
        InvalidInput: The URL is wrong.
        UrlNotAllowed: It may not be fetched.
        MediaUnavailable: Its host failed.
    """

    async def __call__(self, image: Image, /) -> Image: ...


async def refuse(image: Image, /) -> Image:
    """Stands where nothing may be fetched.

    Raises:
        UrlNotAllowed: Always.
    """
    raise UrlNotAllowed(
        "Images are not fetched here: fetching is off. Send the file itself, or have the server started with "
        "--allow-media-domain.",
        param="input",
    )


class ImageCompleter:
    """Fetches the images of inputs. It is the `Completer` of parse.

    Args:
        fetch: See `Fetch`.
        limit: Inputs that are fetched, or wait, fetched, for preprocess at once. With what fetch allows an image to
            take, they bound the memory for inputs of one image each.
        limit_bytes: Images that wait for others of their input, over all requests: of several they may be many.
        memory: Bytes that requests hold, among which those of fetched images count until preprocess has them. None:
            as many as the limits allow.
    """

    def __init__(self, fetch: Fetch, *, limit: int, limit_bytes: int, memory: ByteAccount | None = None) -> None:
        self._fetch = fetch
        self._memory = memory or ByteAccount(sys.maxsize)
        self.limit = limit
        self._limit_bytes = limit_bytes
        self._gathered_bytes = 0
        self._in_hand = anyio.CapacityLimiter(limit)

    @property
    def fetching(self) -> int:
        """Inputs that are fetched, or that wait, fetched, for preprocess."""
        return int(self._in_hand.borrowed_tokens)

    def is_complete(self, given: ModelInput, /) -> bool:
        """No image of it is a URL."""
        return not (given.images and _urls(given))

    @asynccontextmanager
    async def completing(self, item: Item[ModelInput], /) -> AsyncIterator[ModelInput | None]:
        """A block that gets an input with all its images. None: one cannot be had, and the ticket says why."""
        async with self._in_hand:
            with self._memory.hold(item.ticket.tenant) as held:
                gathered = _Gathered(held)
                try:
                    yield await self._fetched(item, gathered)
                finally:
                    self._gathered_bytes -= gathered.bytes

    async def _fetched(self, item: Item[ModelInput], gathered: _Gathered) -> ModelInput | None:
        images = list(item.payload.images)
        places = _urls(item.payload)
        async with anyio.create_task_group() as fetches:
            for place in places:
                fetches.start_soon(self._fetch_one, item, images, place, gathered, len(places) > 1)
        return None if item.ticket.settled else item.payload.with_images(images)

    async def _fetch_one(
        self, item: Item[ModelInput], images: list[Image], place: int, gathered: _Gathered, waits: bool
    ) -> None:
        ticket = item.ticket
        if ticket.settled:
            return
        try:
            image = await self._fetch(images[place])
            if not gathered.held.take(len(image.source)):
                raise Overloaded(
                    "The server has no memory left for another image that it has fetched.", retry_after_s=RETRY_AFTER_S
                )
            images[place] = image
            if waits:
                self._gather(gathered, len(image.source))
        except StagedPoolError as error:
            ticket.fail_input(item.index, error)
        except Exception as error:  # the boundary to what talks to other hosts; its bug is not the caller's
            log.error("media.fetch_failed", exc_info=error)
            failed = StageFailed("an image could not be fetched: a bug of the server", stage="fetch")
            ticket.fail_input(item.index, failed)

    def _gather(self, gathered: _Gathered, size: int) -> None:
        """Count an image that waits for others of its input.

        Raises:
            TooLarge: They are beyond the limit without those of any other.
            Overloaded: They are beyond it with those of all.
        """
        gathered.bytes += size
        self._gathered_bytes += size
        if gathered.bytes > self._limit_bytes:
            raise TooLarge(
                f"The images of one input have more than {self._limit_bytes} bytes together, which is the most that "
                "this server fetches for one.",
                param="input",
            )
        if self._gathered_bytes > self._limit_bytes:
            raise Overloaded(
                f"The server is at its limit of {self._limit_bytes} bytes of images that it has fetched.",
                retry_after_s=RETRY_AFTER_S,
            )


@dataclass(slots=True)
class _Gathered:
    """What has been fetched for an input."""

    held: Holding
    """Counts all images."""
    bytes: int = 0
    """Bytes of images that wait for others."""


def _urls(given: ModelInput) -> list[int]:
    """Places of the images of an input that are yet to be fetched."""
    return [place for place, image in enumerate(given.images) if isinstance(image.source, str)]
