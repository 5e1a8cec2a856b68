"""The engine process's ends of the lines to all fronts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import anyio
from anyio.abc import TaskGroup

from staged_pool.runtime.admission.accounting import Arriving, RequestClass, Reservation
from staged_pool.runtime.card import Lane
from staged_pool.runtime.engine.device_engine import DeviceEngine
from staged_pool.runtime.payloads import Row
from staged_pool.runtime.remote import messages
from staged_pool.runtime.remote.arrays import Block, pack_row, unpack_payload
from staged_pool.runtime.remote.limits import PayloadLimits, require
from staged_pool.runtime.remote.messages import ModelTerms, Welcome
from staged_pool.runtime.remote.packed_errors import pack_error
from staged_pool.runtime.remote.port import Handler, Port, Rings
from staged_pool.runtime.remote.store import ArraysLost, ArrayStore
from staged_pool.runtime.remote.tickets import FrontTicket, count_tokens
from staged_pool.runtime.version import VERSION
from staged_pool.stages.channel import Channel
from staged_pool.stages.errors import EngineStopped, StagedPoolError
from staged_pool.stages.link import Stream
from staged_pool.stages.log import get_logger
from staged_pool.stages.ticket import Item
from staged_pool.stages.trace import Trace, TracedBatch
from staged_pool.stages.wire import Bytes, WireError

log = get_logger("staged_pool.remote")

_Key = tuple[int, Lane]


class FrontDesk:
    """Takes requests of all fronts to the models of this process."""

    def __init__(self) -> None:
        self._terms: list[ModelTerms] = []
        self.engines: list[DeviceEngine] = []
        """The engine of each model, in the order of the settings."""
        self.limits: dict[_Key, PayloadLimits] = {}
        """Limits of payloads, by number of the model and lane."""
        self._fronts: set[_Front] = set()
        self.on_batch: Callable[[TracedBatch], object] | None = None
        """Told of batches with traced requests. None: traces are off here."""

    def add(self, engine: DeviceEngine, terms: ModelTerms) -> None:
        """Add the next model, before any front is served."""
        for lane in engine.stages.prepared:
            self.limits[len(self.engines), lane] = PayloadLimits.of(lane, terms.card, terms.preparation)
        self.engines.append(engine)
        self._terms.append(terms)

    async def serve(self, stream: Stream, rings: Rings | None, store: ArrayStore | None = None) -> str:
        """Serve one front until its line ends; its work is dropped then. Returns the reason of the end.

        A wrong number of the front ends its line, and so does a bug of ours that one of its messages reaches: neither
        ends this process, which computes for other fronts, too.
        """
        welcome = Welcome(VERSION, self._terms)
        front = _Front(self, lambda handlers: Port(stream, rings, handlers, store), welcome)
        self._fronts.add(front)
        try:
            return await front.run()
        except Exception as error:
            log.exception("front.crashed")
            return f"its line has crashed: {type(error).__name__}"
        finally:
            self._fronts.discard(front)
            front.leave_all()

    def tell_states(self) -> None:
        """Send the state of each model to all fronts."""
        for front in self._greeted():
            front.tell_states()

    async def drain(self, timeout_s: float) -> None:
        """Tell all fronts that no more requests are taken, and finish those that were.

        After `timeout_s` seconds the rest fails. The lines stay open.
        """
        for front in self._greeted():
            front.port.post(messages.Leaving())
        async with anyio.create_task_group() as draining:
            for engine in self.engines:
                draining.start_soon(engine.drain, timeout_s)

    def give(self, number: int, rows: Sequence[tuple[FrontTicket, Item[Row]]]) -> None:
        """Send the rows of a model to the fronts that wait for them."""
        by_front: dict[_Front, list[tuple[FrontTicket, Item[Row]]]] = {}
        for ticket, item in rows:
            by_front.setdefault(cast(_Front, ticket.front), []).append((ticket, item))
        for front, own in by_front.items():
            front.give(number, own)

    def clear(self, message: messages.Clear) -> None:
        """Empty the caches of a model, here and in all fronts."""
        if message.results:
            self.engines[message.model].clear_result_cache()
        for front in self._greeted():
            front.port.post(message)

    def _greeted(self) -> list[_Front]:
        """Return the fronts that take messages: the first one for each is its welcome."""
        return [front for front in self._fronts if front.is_greeted]


class _Front:
    """One front, as the engine process sees it."""

    def __init__(
        self, desk: FrontDesk, open_port: Callable[[Mapping[type[Any], Handler]], Port], welcome: Welcome
    ) -> None:
        self._desk = desk
        self._welcome = welcome
        self._tickets: dict[int, tuple[int, FrontTicket]] = {}
        """Number of the model and claim of each request, by its number."""
        self._entering: dict[int, anyio.CancelScope] = {}
        """Requests that wait for room."""
        self._inboxes: dict[_Key, Channel[Any]] = {}
        self._tasks: TaskGroup
        self.port = open_port({messages.Hello: self._greet})
        self.is_greeted = False

    async def run(self) -> str:
        """Serve until the line ends. Returns the reason."""
        try:
            return await self._run()
        finally:
            for inbox in self._inboxes.values():
                inbox.sender.close()
                inbox.receiver.close()

    async def _run(self) -> str:
        async with anyio.create_task_group() as self._tasks:
            for number, engine in enumerate(self._desk.engines):
                for lane in engine.stages.prepared:
                    # The front has a credit for each list that finds room here.
                    inbox: Channel[Any] = Channel(f"front {lane}", engine.config.channel_capacity)
                    self._inboxes[number, lane] = inbox
                    self._tasks.start_soon(self._pass_on, number, lane, inbox)
            reason = await self.port.run()
            self._tasks.cancel_scope.cancel()
        return reason

    async def _pass_on(self, number: int, lane: Lane, inbox: Channel[Any]) -> None:
        """Pass items to the batch stage of a lane; each list that leaves gives its credit back."""
        sender = self._desk.engines[number].stages.prepared[lane]
        async for items in inbox.receiver:
            try:
                await sender.send(items)
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                for item in items:
                    item.ticket.fail(EngineStopped("The engine is stopped."))
            del items  # their payloads may lie in memory of the front, and the next ones may be long in coming
            self.port.post(messages.Credit(number, lane, 1))

    def leave_all(self) -> None:
        """Drop the work of a front that is gone."""
        for number in list(self._tickets):
            self._leave(messages.Leave(number, answered=False, elsewhere_s=0.0, rejected=False))
        for engine in self._desk.engines:
            for preparing in engine.stages.preparing.values():
                preparing.reports.pop(self, None)

    def tell_states(self) -> None:
        """Send the state of each model."""
        for number, engine in enumerate(self._desk.engines):
            self.port.post(messages.State(number, engine.fault, engine.stall(), engine.fed(), engine.load()))

    def give(self, number: int, rows: Sequence[tuple[FrontTicket, Item[Row]]]) -> None:
        """Send rows to the front."""
        parts: list[Bytes] = []
        packed = [pack_row(item.payload.values, parts) for _, item in rows]
        keys = [(ticket.number, item.index, item.part) for ticket, item in rows]
        queue_s = [ticket.timeline.queue_s for ticket, _ in rows]
        device_s = [ticket.timeline.device_s for ticket, _ in rows]
        fed = self._desk.engines[number].fed()
        self.port.post_arrays(
            lambda block, size: messages.Rows(number, block, size, keys, packed, queue_s, device_s, fed), parts
        )

    def failed(self, ticket: FrontTicket, error: StagedPoolError, index: int | None) -> None:
        """Tell the front the error of a request."""
        self.port.post(messages.Failed(ticket.number, index, pack_error(error)))

    def _greet(self, message: messages.Hello, _: object) -> None:
        if message.version != VERSION:
            raise WireError(f"the front runs version {message.version}; this engine process runs {VERSION}")
        self.is_greeted = True
        self.port.take(
            {
                messages.Admit: self._admit,
                messages.Count: self._count,
                messages.Items: self._take_items,
                messages.Leave: lambda message, _: self._leave(message),
                messages.Clear: self._clear,
            }
        )
        self.port.post(self._welcome)
        self.tell_states()

    def _clear(self, message: messages.Clear, _: object) -> None:
        self._engine(message.model)  # it exists
        self._desk.clear(message)

    def _admit(self, message: messages.Admit, _: object) -> None:
        engine = self._engine(message.model)
        if message.request in self._tickets or message.request in self._entering:
            raise WireError(f"the front asks twice for a request {message.request}")
        now = engine.clock()
        arriving = Arriving(
            message.body_bytes,
            math.inf if message.left_s is None else message.left_s,
            RequestClass(message.priority, message.tenant),
            message.images,
        )
        if message.waits:
            scope = self._entering[message.request] = anyio.CancelScope()  # now: it may leave before the task begins
            self._tasks.start_soon(self._admit_later, engine, message, arriving, now, scope)
            return
        try:
            reservation = engine.entrance.enter_nowait(arriving)
        except StagedPoolError as error:
            self.port.post(messages.Refused(message.request, pack_error(error)))
            return
        self._entered(engine, message, reservation, now)

    async def _admit_later(
        self,
        engine: DeviceEngine,
        message: messages.Admit,
        arriving: Arriving,
        now: float,
        scope: anyio.CancelScope,
    ) -> None:
        with scope, engine.requests.entering():
            try:
                reservation = await engine.entrance.enter(arriving)
            except StagedPoolError as error:
                self.port.post(messages.Refused(message.request, pack_error(error)))
            else:
                if scope.cancel_called:  # it was let in at the moment that it left
                    engine.entrance.leave(reservation)
                else:
                    self._entered(engine, message, reservation, now)
            finally:
                del self._entering[message.request]

    def _entered(
        self, engine: DeviceEngine, message: messages.Admit, reservation: Reservation, arrived_at: float
    ) -> None:
        ticket = FrontTicket(message.request, reservation, message.left_s, arrived_at, self)
        self._tickets[message.request] = message.model, ticket
        engine.requests.open.add(ticket)
        self.port.post(messages.Admitted(message.request))

    def _count(self, message: messages.Count, _: object) -> None:
        if (ticket := self._open_ticket(message.request)) is None:
            return
        number = self._tickets[message.request][0]
        if message.trace is not None and (on_batch := self._desk.on_batch) is not None:
            ticket.timeline.trace = Trace.unpacked(message.trace, on_batch, self._engine(number).model.card.name)
        for lane in message.inputs:
            self._inbox(number, lane)  # it exists
        ticket.count_inputs(message.inputs)
        try:
            self._engine(number).admission.count_items(ticket.reservation, message.inputs)
        except StagedPoolError as error:
            ticket.fail(error)

    def _take_items(self, message: messages.Items, block_of: Callable[[], Block]) -> None:
        engine = self._engine(message.model)
        inbox = self._inbox(message.model, message.lane)
        engine.stages.preparing[message.lane].reports[self] = message.preparing, message.call_s
        try:
            now, block = engine.clock(), block_of()
        except ArraysLost as error:
            self._lose_items(message, error)
            return
        items: list[Item[Any]] = []
        limits = self._desk.limits[message.model, message.lane]
        for (request, index, part), identity, plain in zip(
            message.keys, message.identities, message.payloads, strict=True
        ):
            payload = unpack_payload(plain, block, limits)
            require(not part or engine.model.card.splits_long_inputs, "keys", "has parts of an input that is not cut")
            if (ticket := self._open_ticket(request)) is not None:
                require(self._tickets[request][0] == message.model, "keys", "has a request of another model")
                ticket.take_item(message.lane, index, part)
                key = limits.batch_key(payload)
                items.append(Item(ticket, index, payload, now, payload.tokens, key, part, identity))
        count_tokens(items, message.lane)
        if not inbox.sender.send_nowait(items):
            raise WireError("the front sends items without a credit for them")

    def _lose_items(self, message: messages.Items, error: ArraysLost) -> None:
        """Fail the requests of items whose arrays are lost."""
        for request in {key[0] for key in message.keys}:
            if (ticket := self._open_ticket(request)) is not None:
                ticket.fail(EngineStopped(f"The prepared inputs of this request were lost: {error}"))
        self.port.post(messages.Credit(message.model, message.lane, 1))

    def _leave(self, message: messages.Leave) -> None:
        if (scope := self._entering.get(message.request)) is not None:
            scope.cancel()
        if (found := self._tickets.pop(message.request, None)) is None:
            return
        number, ticket = found
        engine = self._desk.engines[number]
        ticket.leave()
        engine.requests.remove(ticket)
        if message.answered:
            engine.answered.count(engine.clock())
        engine.entrance.leave(
            ticket.reservation,
            answered=message.answered,
            elsewhere_s=message.elsewhere_s,
            rejected=message.rejected,
        )

    def _engine(self, number: int) -> DeviceEngine:
        if not 0 <= number < len(self._desk.engines):
            raise WireError(f"the front speaks of a model {number}, which does not exist")
        return self._desk.engines[number]

    def _inbox(self, number: int, lane: Lane) -> Channel[Any]:
        if (inbox := self._inboxes.get((number, lane))) is None:
            raise WireError(f"the front speaks of a lane {lane}, which model {number} does not have")
        return inbox

    def _open_ticket(self, request: int) -> FrontTicket | None:
        """Return the claim of a request; None if it has failed, or another process has admitted it."""
        if (found := self._tickets.get(request)) is None:
            error = EngineStopped("The engine process was started anew while it worked on this request.")
            self.port.post(messages.Failed(request, None, pack_error(error)))
            return None
        return None if found[1].settled else found[1]
