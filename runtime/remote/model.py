"""A model of the engine process, as a front sees it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol, cast

import anyio

from staged_pool.runtime.admission.accounting import Arriving, Reservation
from staged_pool.runtime.admission.controller import Admission, LimitReached
from staged_pool.runtime.card import Lane
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.payloads import ModelRow
from staged_pool.runtime.remote import messages
from staged_pool.runtime.remote.arrays import pack_key, pack_payload
from staged_pool.runtime.remote.batch import Outgoing, Packed, RemoteBatchStage
from staged_pool.runtime.remote.limits import RowLimits
from staged_pool.runtime.remote.messages import ModelTerms
from staged_pool.runtime.statistics import EngineLoad
from staged_pool.stages.batch_parts import NearbyWork
from staged_pool.stages.channel import Channel, Sender
from staged_pool.stages.errors import ADMISSION, DeadlineExceeded, EngineStopped, StagedPoolError
from staged_pool.stages.scheduling.service_time import LaneServiceTime
from staged_pool.stages.stage import StageOptions
from staged_pool.stages.ticket import Item, Ticket
from staged_pool.stages.wire import Bytes, WireError

LOOK_AGAIN_S: Final = 0.5
"""Seconds between two tries of a request whose answer found no memory."""

GONE: Final = 0
"""Number of no request: that of an item whose request has left while its arrays were stored."""

_UNLIMITED: Final = 1 << 62
_LONGEST_S: Final = 86_400.0
"""The longest target delay that the settings allow."""


class Line(Protocol):
    """The line to the engine process; see `FrontLine`."""

    @property
    def fault(self) -> str | None: ...

    @property
    def is_asked(self) -> bool: ...

    def post(self, message: messages.Message) -> None: ...

    def absent(self) -> EngineStopped: ...

    async def wait_for_engine(self, timeout_s: float) -> None: ...

    def silence(self) -> str | None: ...

    async def ask(self, number: int, arriving: Arriving, *, waits: bool) -> int: ...

    def count(self, request: int, model: Any, ticket: Ticket, inputs: Mapping[Lane, int]) -> None: ...

    def reject(self, error: StagedPoolError, number: int | None = None) -> None: ...

    def leave(self, request: int, *, answered: bool, elsewhere_s: float, rejected: bool) -> None: ...

    @property
    def has_store(self) -> bool: ...

    async def put(self, parts: Sequence[Bytes]) -> bytes | None: ...

    def post_items(
        self,
        message: Callable[[messages.BlockName | None, int], messages.Items],
        parts: Sequence[Bytes],
        stored: bytes | None,
    ) -> None: ...


class RemoteModel:
    """A model of the engine process, as one front sees it. It is the account and the entrance of the front's engine.

    The account of a front feeds its preprocess stage. Admission has one account for all fronts, in the engine process.

    Args:
        line: The line to the engine process.
        number: Number of the model.
        config: Settings of the engine.
        terms: See `ModelTerms`.
        service_times: Service time of each lane, before any measurement.
        input_tokens: See `Admission`.
        clock: Clock of the stages, in seconds.
    """

    is_immediate: Final = False
    """Each request waits for the answer of the engine process."""

    def __init__(
        self,
        line: Line,
        number: int,
        config: EngineConfig,
        terms: ModelTerms,
        *,
        service_times: Mapping[Lane, LaneServiceTime],
        input_tokens: float,
        clock: Callable[[], float],
    ) -> None:
        self._line = line
        self._number = number
        self._clock = clock
        self._credits = config.channel_capacity
        self.secret = terms.secret
        self.row_limits = RowLimits(terms.card)
        self._fed_limits = {lane: terms.fed_limits[lane] for lane in service_times}
        self._fed_room = dict(self._fed_limits)
        """Limits less the tokens that other fronts have fed."""
        limits = replace(
            config,
            max_requests=_UNLIMITED,
            max_items=_UNLIMITED,
            max_tokens=_UNLIMITED,
            max_bytes=_UNLIMITED,
            target_delay_s=_LONGEST_S,
        )
        self.account = Admission(limits, service_times, self._fed_room, clock, input_tokens)
        self.check_open: Callable[[], object] = lambda: None
        self.clear_images: Callable[[], object] = lambda: None
        """Drops the cached images of this front."""
        self._lanes: dict[Lane, RemoteBatchStage] = {}
        self._numbers: dict[object, int] = {}
        """Numbers of the requests, by reservation."""
        self._fault: str | None = None
        self._stall: str | None = None
        self.load: EngineLoad | None = None
        """Load of all fronts together. None: it is not known yet."""

    @property
    def fault(self) -> str | None:
        """Reason for taking no requests; None if there is none."""
        return self._line.fault or self._fault

    @property
    def is_away(self) -> bool:
        """True while there is no engine process."""
        return self._line.fault is not None

    # ---- entrance ----

    async def admit(self, arriving: Arriving, *, waits: bool = False) -> Reservation:
        """Ask the engine process to admit a request, and open its account here.

        Raises:
            StagedPoolError: It is not admitted.
        """
        if self.is_away:
            arriving = await self._wait_for_engine(arriving)
        self.check_open()
        request = await self._line.ask(self._number, arriving, waits=waits)
        reservation = self.account.try_enter(
            body_bytes=arriving.body_bytes,
            timeout_s=math.inf,
            request_class=arriving.request_class,
            images=arriving.images,
        )
        assert not isinstance(reservation, LimitReached)  # it has no limits
        reservation.waits = waits
        self._numbers[reservation] = request
        return reservation

    async def _wait_for_engine(self, arriving: Arriving) -> Arriving:
        """Wait for an engine process that is away. Returns the request with the time that is left to it.

        Raises:
            DeadlineExceeded: No time is left.
            EngineStopped: The engine process has not come back.
        """
        late_at = self._clock() + arriving.timeout_s
        await self._line.wait_for_engine(arriving.timeout_s)
        if (left_s := late_at - self._clock()) <= 0:
            raise DeadlineExceeded(
                "The time limit of the request passed; the engine process was away.", stage=ADMISSION
            )
        return arriving._replace(timeout_s=left_s)

    def leave(
        self, reservation: Reservation, *, answered: bool = False, elsewhere_s: float = 0.0, rejected: bool = False
    ) -> None:
        """Close the account of a request, and tell the engine process that it has left."""
        self.account.leave(reservation, answered=answered, elsewhere_s=elsewhere_s)
        request = self._numbers.pop(reservation)
        self._line.leave(request, answered=answered, elsewhere_s=elsewhere_s, rejected=rejected)

    async def wait_for_departure(self) -> None:
        """Wait before a request tries again that found no memory for its answer."""
        await anyio.sleep(LOOK_AGAIN_S)

    def grant(self) -> None:
        """Reject the requests that have asked to enter, if this engine takes none any more."""
        if not self._line.is_asked:
            return
        try:
            self.check_open()
        except EngineStopped as error:
            self._line.reject(error, self._number)
        except StagedPoolError:
            pass  # this process is short of memory: they may enter all the same

    @property
    def waiting(self) -> int:
        """Return 0: requests wait for room in the engine process."""
        return 0

    def count_ticket(self, ticket: Ticket, inputs: Mapping[Lane, int]) -> None:
        """Set the number of inputs of a decoded request.

        Raises:
            TooLarge: The request has too many inputs.
        """
        reservation = cast(Reservation, ticket.load)
        self.account.count_items(reservation, inputs)
        self._line.count(self._numbers[reservation], self, ticket, inputs)

    # ---- lanes ----

    def batch_stage(
        self,
        lane: Lane,
        prepared: Channel[Any],
        rows: Sender[Sequence[Item[ModelRow]]],
        *,
        nearby: NearbyWork,
        options: StageOptions,
    ) -> RemoteBatchStage:
        """Build the stage that stands for the batch stage of a lane."""
        stage = RemoteBatchStage(
            lane,
            prepared.receiver,
            rows,
            pack=self._pack,
            post=self._post,
            absent=self._line.absent,
            credits=self._credits,
            nearby=nearby,
            stall=lambda: self._line.silence() or self._stall,
            options=options,
            name=prepared.name,
        )
        self._lanes[lane] = stage
        return stage

    def lane(self, lane: Lane) -> RemoteBatchStage:
        """Return the stage of a lane.

        Raises:
            WireError: The model has no such lane.
        """
        if (stage := self._lanes.get(lane)) is None:
            raise WireError(f"the engine process speaks of a lane {lane}, which this model does not have")
        return stage

    def take_row(
        self,
        ticket: Ticket,
        key: tuple[int, int, int],
        row_of: Callable[[Any], ModelRow],
        queue_s: float,
        device_s: float,
    ) -> None:
        """Give a row to postprocess, if its request still waits for it."""
        for lane, stage in self._lanes.items():
            if (item := stage.take_row(ticket, key[1], key[2], row_of)) is not None:
                ticket.load.computed(lane, item.tokens)
                ticket.timeline.queue_s = max(ticket.timeline.queue_s, queue_s)
                ticket.timeline.device_s = max(ticket.timeline.device_s, device_s)
                if (trace := ticket.timeline.trace) is not None:  # the times of the line stay between its spans
                    now = stage.meter.now()
                    trace.passed("queue", now - device_s - queue_s, now - device_s)
                    trace.passed("device", now - device_s, now)
                return

    def take_state(self, state: messages.State) -> None:
        """Take the state of the model in the engine process."""
        self._fault, self._stall, self.load = state.fault, state.stall, state.load
        self.take_fed(state.fed)

    def take_fed(self, fed: Mapping[Lane, int]) -> None:
        """Take the tokens that all fronts have fed: what the others have of a limit is not for this front."""
        for lane, tokens in fed.items():
            others = max(0, tokens - self.lane(lane).pending_tokens)
            room = max(1, self._fed_limits[lane] - others)
            grows, self._fed_room[lane] = room > self._fed_room[lane], room
            if grows:
                self.account.in_flight.fed_tokens_freed(lane)

    def clear(self, *, results: bool) -> None:
        """Empty the caches of images in all fronts; with `results`, the cached rows of the engine process, too."""
        self._line.post(messages.Clear(self._number, results))

    def forget(self, ticket: Ticket) -> None:
        """Drop the items of a request that has ended."""
        for stage in self._lanes.values():
            stage.forget(ticket)

    def end(self) -> None:
        """Begin anew: the engine process has ended."""
        for stage in self._lanes.values():
            stage.credit.reset()
        self.take_fed(dict.fromkeys(self._lanes, 0))

    async def _pack(self, items: Sequence[Item[Any]]) -> Packed | None:
        """Put the arrays of items into the store of the line."""
        if not self._line.has_store:
            return None
        parts: list[Bytes] = []
        payloads = [pack_payload(item.payload, parts) for item in items]
        return Packed(payloads, parts, await self._line.put(parts))

    def _post(self, stage: RemoteBatchStage, outgoing: Outgoing) -> None:
        if self._line.fault is not None:
            raise anyio.BrokenResourceError
        items, packed = outgoing
        open_items = [item for item in items if not item.ticket.settled]  # some may have left while the list waited
        if packed is None:
            items, parts = open_items, list[Bytes]()
            packed = Packed([pack_payload(item.payload, parts) for item in items], parts, None)
        payloads = packed.payloads
        keys = [(self._numbers.get(item.ticket.load, GONE), item.index, item.part) for item in items]
        identities = [None if item.identity is None else pack_key(item.identity) for item in items]
        stage.sent(open_items)
        self._line.post_items(
            lambda block, size: messages.Items(
                self._number,
                stage.lane,
                stage.nearby.preparing(),
                stage.nearby.ready_s(),
                block,
                size,
                keys,
                identities,
                list(payloads),
            ),
            packed.parts,
            packed.stored,
        )
