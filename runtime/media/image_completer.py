"""Completion of inputs: their images and videos are fetched before preprocess gets them."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Protocol

import anyio

from staged_pool.runtime.memory.budget import ByteAccount, Holding
from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.requests import Image
from staged_pool.runtime.statistics import FETCH_OUTCOMES, LimiterStatistics
from staged_pool.stages.errors import Overloaded, StagedPoolError, StageFailed, TooLarge, UrlNotAllowed
from staged_pool.stages.log import get_logger
from staged_pool.stages.meter import Histogram, HistogramSnapshot
from staged_pool.stages.ticket import Item

RETRY_AFTER_S: Final = 1.0
"""Retry-After, in seconds, if fetched images take too much memory: about the time of one fetch."""

log = get_logger("staged_pool.engine")


class Fetch(Protocol):
    """Function that fetches the image of a URL.

    Cancellation ends it at once.

    Raises:
        InvalidInput: The URL is malformed.
        UrlNotAllowed: The URL is not allowed.
        MediaUnavailable: The host failed.
    """

    async def __call__(self, image: Image, /) -> Image: ...


async def reject_fetch(image: Image, /) -> Image:
    """Reject every URL: the `Fetch` of an engine without fetching.

    Raises:
        UrlNotAllowed: Always.
    """
    raise UrlNotAllowed(
        "Images are not fetched: fetching is off. Send the file itself, or start the server with --allow-media-domain.",
        param="input",
    )


class ImageCompleter:
    """Fetches the images of inputs: the `Completer` of the parse stage.

    Args:
        fetch: See `Fetch`.
        limit: Most inputs at once that are being fetched, or wait for preprocess after that. For inputs of one image,
            it limits memory together with the largest size of an image.
        limit_bytes: Limit in bytes of fetched images that wait for others of their input, over all requests.
        memory: Account of bytes that requests hold. Fetched images count until preprocess has them. None: no limit.
        clock: Clock of the stages, in seconds.
    """

    def __init__(
        self,
        fetch: Fetch,
        *,
        limit: int,
        limit_bytes: int,
        memory: ByteAccount | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._fetch = fetch
        self._memory = memory or ByteAccount(sys.maxsize)
        self.limit = limit
        self._limit_bytes = limit_bytes
        self._waiting_bytes = 0
        self._inputs = anyio.CapacityLimiter(limit)
        self._clock = clock
        self._seconds = {outcome: Histogram() for outcome in FETCH_OUTCOMES}

    def limiters(self) -> Mapping[str, LimiterStatistics]:
        """See `CountingCompleter.limiters`."""
        return {"fetch": LimiterStatistics.of(self._inputs)}

    def fetches(self) -> Mapping[str, HistogramSnapshot]:
        """See `CountingCompleter.fetches`."""
        return {outcome: seconds.snapshot() for outcome, seconds in self._seconds.items()}

    @property
    def fetching(self) -> int:
        """Number of inputs that are being fetched, or wait for preprocess after that."""
        return int(self._inputs.borrowed_tokens)

    def is_complete(self, given: ModelInput, /) -> bool:
        """True: no image of the input is a URL."""
        return not (given.images and _urls(given))

    @asynccontextmanager
    async def completing(self, item: Item[ModelInput], /) -> AsyncIterator[ModelInput | None]:
        """Provide an input with all its images for a block. None: fetching failed, and the ticket has the error."""
        async with self._inputs:
            with self._memory.hold(item.ticket.tenant) as held:
                fetched = _Fetched(held)
                try:
                    yield await self._fetch_images(item, fetched)
                finally:
                    self._waiting_bytes -= fetched.bytes

    async def _fetch_images(self, item: Item[ModelInput], fetched: _Fetched) -> ModelInput | None:
        images = list(item.payload.images)
        places = _urls(item.payload)
        async with anyio.create_task_group() as fetches:
            for place in places:
                fetches.start_soon(self._fetch_one, item, images, place, fetched, len(places) > 1)
        return None if item.ticket.settled else item.payload.with_images(images)

    async def _fetch_one(
        self, item: Item[ModelInput], images: list[Image], place: int, fetched: _Fetched, waits: bool
    ) -> None:
        ticket = item.ticket
        if ticket.settled:
            return
        try:
            image = await self._timed(images[place])
            if not fetched.held.take(len(image.source)):
                raise Overloaded(
                    "The server has no memory left for another fetched image.", retry_after_s=RETRY_AFTER_S
                )
            images[place] = image
            if waits:
                self._count_waiting(fetched, len(image.source))
        except StagedPoolError as error:
            ticket.fail_input(item.index, error)
        except Exception as error:  # a bug in fetching is not the caller's fault
            log.error("media.fetch_failed", exc_info=error)
            failed = StageFailed("an image could not be fetched: a bug of the server", stage="fetch")
            ticket.fail_input(item.index, failed)

    async def _timed(self, image: Image) -> Image:
        """Fetch an image, and count the time by outcome."""
        began, outcome = self._clock(), "abandoned"
        try:
            image = await self._fetch(image)
            outcome = "fetched"
        except Exception:
            outcome = "failed"
            raise
        finally:
            self._seconds[outcome].observe(self._clock() - began)
        return image

    def _count_waiting(self, fetched: _Fetched, size: int) -> None:
        """Count an image that waits for others of its input.

        Raises:
            TooLarge: The images of this input alone exceed the limit.
            Overloaded: The waiting images of all inputs exceed the limit.
        """
        fetched.bytes += size
        self._waiting_bytes += size
        if fetched.bytes > self._limit_bytes:
            raise TooLarge(
                f"The images of one input have more than {self._limit_bytes} bytes together, this server's limit.",
                param="input",
            )
        if self._waiting_bytes > self._limit_bytes:
            raise Overloaded(
                f"The server is at its limit of {self._limit_bytes} bytes of fetched images.",
                retry_after_s=RETRY_AFTER_S,
            )


@dataclass(slots=True)
class _Fetched:
    """Fetched images of one input."""

    held: Holding
    """The memory of all its images."""
    bytes: int = 0
    """Bytes of images that wait for others of the input."""


def _urls(given: ModelInput) -> list[int]:
    """Return the indices of images that have not been fetched."""
    return [place for place, image in enumerate(given.images) if isinstance(image.source, str)]
