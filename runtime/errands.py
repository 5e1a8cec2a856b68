"""What callers do for their own pictures: fetch what is only a URL, and feed them into preprocess one by one.

It runs in the task of each caller, not in a stage: a host that is slow, or a request of a thousand pictures, holds up
nobody but its own caller, and a caller who leaves takes its fetches along. Parse feeds texts itself, and never waits
for pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import anyio

from staged_pool.runtime.model import Lane, ModelInput
from staged_pool.runtime.requests import Image
from staged_pool.stages.channel import ENDED, Outlet
from staged_pool.stages.errors import EngineStopped, Overloaded, StagedPoolError, StageFailed, TooLarge, UrlNotAllowed
from staged_pool.stages.log import get_logger
from staged_pool.stages.ticket import Ticket
from staged_pool.stages.work import Item

RETRY_AFTER_S: Final = 1.0
"""Said of a server that holds too much of what it has fetched: about what a fetch takes."""

log = get_logger("staged_pool.engine")


class Fetch(Protocol):
    """Gets the picture that a URL names.

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
        "Pictures are not fetched here: fetching is off. Send the file itself, or have the server started with "
        "--allow-media-domain.",
        param="input",
    )


class Errands:
    """Sees to the inputs that parse leaves to their callers.

    Args:
        outlets: By lane: lists of one item each.
        fetch: See `Fetch`.
        limit: Inputs with URLs that are fetched or wait, fetched, for preprocess at once: they bound the memory, with
            what fetch allows a picture to take, for inputs of one picture each.
        limit_bytes: Pictures that wait for others of their input, over all callers: of several they may be many.
        room_tokens: By lane: a request is fed no further while so many of its tokens wait for the device.
        clock: Of the stages.
    """

    def __init__(
        self,
        outlets: Mapping[Lane, Outlet[Sequence[Item[ModelInput]]]],
        *,
        fetch: Fetch,
        limit: int,
        limit_bytes: int,
        room_tokens: Mapping[Lane, int],
        clock: Callable[[], float],
    ) -> None:
        self._outlets = outlets
        self._fetch = fetch
        self._limit = limit
        self._limit_bytes = limit_bytes
        self._gathered_bytes = 0
        self._in_hand = anyio.CapacityLimiter(limit)
        self._room_tokens = room_tokens
        self._clock = clock

    @property
    def fetching(self) -> int:
        """Inputs that are fetched, or that wait, fetched, for preprocess."""
        return int(self._in_hand.borrowed_tokens)

    def close(self) -> None:
        """Say that no caller has anything more to feed."""
        for outlet in self._outlets.values():
            outlet.close()

    async def run(self, ticket: Ticket, items: Sequence[Item[ModelInput]]) -> None:
        """Fetch and feed these items of a request, until its ticket is settled: by them, or by whatever happens to it.
        What is at hand does not wait behind what is fetched.

        Cancelled, or when the ticket is settled, the fetches are cancelled and nothing more is fed.
        """
        at_hand = [item for item in items if not _urls(item.payload)]
        to_fetch = [item for item in items if _urls(item.payload)]
        async with anyio.create_task_group() as workers:
            if at_hand:
                workers.start_soon(self._work, ticket, iter(at_hand))
            left = iter(to_fetch)
            for _ in range(min(len(to_fetch), self._limit)):
                workers.start_soon(self._work, ticket, left)
            await ticket.wait_settled()
            workers.cancel_scope.cancel()

    async def _work(self, ticket: Ticket, left: Iterator[Item[ModelInput]]) -> None:
        for item in left:
            lane = item.payload.lane
            await ticket.wait_for_room(lane, self._room_tokens[lane])
            if ticket.settled:
                return
            if not _urls(item.payload):
                await self._feed(item, item.payload, lane)
                continue
            asked_at = self._clock()
            async with self._in_hand:  # until it is handed on: what is fetched ahead of preprocess takes memory
                gathered = _Gathered()
                try:
                    if (whole := await self._fetched(item, gathered)) is None:
                        return
                    ticket.timeline.fetch_s = max(ticket.timeline.fetch_s, self._clock() - asked_at)
                    await self._feed(item, whole, lane)
                finally:
                    self._gathered_bytes -= gathered.bytes

    async def _feed(self, item: Item[ModelInput], given: ModelInput, lane: Lane) -> None:
        try:
            await self._outlets[lane].send([item.carrying(given, sent_at=self._clock())])
        except ENDED:
            item.ticket.fail(EngineStopped("The engine is stopped."))

    async def _fetched(self, item: Item[ModelInput], gathered: _Gathered) -> ModelInput | None:
        """The input with its pictures; None where one could not be had, and the ticket says why."""
        images = list(item.payload.images)
        places = _urls(item.payload)
        async with anyio.create_task_group() as fetches:
            for place in places:
                fetches.start_soon(self._fetch_one, item, images, place, gathered if len(places) > 1 else None)
        return None if item.ticket.settled else item.payload.with_images(images)

    async def _fetch_one(
        self, item: Item[ModelInput], images: list[Image], place: int, gathered: _Gathered | None
    ) -> None:
        ticket = item.ticket
        if ticket.settled:
            return
        ticket.stage = "fetch"
        try:
            images[place] = await self._fetch(images[place])
            if gathered is not None:
                self._gather(gathered, len(images[place].source))
        except StagedPoolError as error:
            ticket.fail_input(item.index, error)
        except Exception as error:  # the boundary to what talks to other hosts; its bug is not the caller's
            log.error("media.fetch_failed", exc_info=error)
            ticket.fail_input(
                item.index, StageFailed("a picture could not be fetched: a bug of the server", stage="fetch")
            )

    def _gather(self, gathered: _Gathered, size: int) -> None:
        """Count a picture that waits for others of its input.

        Raises:
            TooLarge: They are beyond the limit without those of any other.
            Overloaded: They are beyond it with those of all.
        """
        gathered.bytes += size
        self._gathered_bytes += size
        if gathered.bytes > self._limit_bytes:
            raise TooLarge(
                f"The pictures of one input have more than {self._limit_bytes} bytes together, which is the most that "
                "this server fetches for one.",
                param="input",
            )
        if self._gathered_bytes > self._limit_bytes:
            raise Overloaded(
                f"The server is at its limit of {self._limit_bytes} bytes of pictures that it has fetched.",
                retry_after_s=RETRY_AFTER_S,
            )


@dataclass(slots=True)
class _Gathered:
    """What has been fetched for an input of several pictures."""

    bytes: int = 0


def _urls(given: ModelInput) -> list[int]:
    """Which of the pictures of an input are yet to be fetched."""
    return [place for place, image in enumerate(given.images) if isinstance(image.source, str)]
