"""A front's end of the line to the engine process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Final, cast

import anyio

from staged_pool.runtime.admission.accounting import Arriving
from staged_pool.runtime.card import Lane
from staged_pool.runtime.payloads import Payload, Row, Values
from staged_pool.runtime.remote import messages
from staged_pool.runtime.remote.arrays import FAR_S, Block, unpack_row
from staged_pool.runtime.remote.messages import ModelTerms, Welcome
from staged_pool.runtime.remote.model import RemoteModel
from staged_pool.runtime.remote.packed_errors import unpack_error
from staged_pool.runtime.remote.port import Port, Rings
from staged_pool.runtime.remote.store import ArrayStore
from staged_pool.runtime.requests import Output
from staged_pool.runtime.version import VERSION
from staged_pool.stages.errors import ADMISSION, DeadlineExceeded, EngineStopped, StagedPoolError, detached
from staged_pool.stages.link import Stream
from staged_pool.stages.log import get_logger
from staged_pool.stages.ticket import Ticket
from staged_pool.stages.wakeup import Wakeup, wakeup
from staged_pool.stages.wire import Bytes, WireError

ABSENT: Final = "the engine process has ended, and is started anew"

BEAT_S: Final = 0.5
"""Seconds between two reports of the engine process."""

SILENT_S: Final = 2 * BEAT_S
"""Seconds without a report after which a front is not ready, by its own beats: a freeze of it is no silence."""

PATIENCE_S: Final = 0.5
"""Longest wait of a request for an engine process that is away.

Clients that ask again at once would otherwise take the cores that it needs to start."""

FIRST_LOAD_S: Final = 10.0
"""Seconds that the engine process takes to load, before the first time is known."""

log = get_logger("staged_pool.remote")


@dataclass(slots=True)
class _Asked:
    """A request that has asked the engine process to enter."""

    number: int
    """Number of its model."""
    woken: Wakeup = field(default_factory=wakeup)
    error: StagedPoolError | None = None


class FrontLine:
    """The line of a front to the engine process. It may end and begin anew; its models and their engines stay.

    Args:
        clock: Clock of the stages, in seconds.
        patience_s: See `PATIENCE_S`.
    """

    def __init__(self, clock: Callable[[], float], patience_s: float = PATIENCE_S) -> None:
        self._clock = clock
        self._patience_s = patience_s
        self._port: Port | None = None
        self.models: list[RemoteModel] = []
        """Models that this front has opened, in the order of the settings."""
        self._states: dict[int, messages.State] = {}
        self.welcomed = anyio.Event()
        """Set once the terms of all models are known."""
        self.terms: Sequence[ModelTerms] = ()
        self.load_s = FIRST_LOAD_S
        """Seconds between the end of the last line and the welcome of the next one."""
        self._ended_at = clock()
        self._silent_s = 0.0
        self._came_back = anyio.Event()
        """Set once a line that had ended is up again."""
        self._numbers = count(1)
        self._asked: dict[int, _Asked] = {}
        self._requests: dict[int, tuple[RemoteModel, Ticket]] = {}
        """Requests that are decoded, by number."""
        self.is_leaving = False
        """True once the engine process takes no more requests, and is about to end."""

    @property
    def fault(self) -> str | None:
        """Reason why nothing can be computed; None while the line is up."""
        return ABSENT if self._port is None else None

    @property
    def requests(self) -> int:
        """Requests of this front that ask to enter, or are in flight."""
        return len(self._asked) + len(self._requests)

    async def run(self, stream: Stream, rings: Rings | None, store: ArrayStore | None = None) -> str:
        """Serve one line until it ends; all its requests fail then. Returns the reason of the end."""
        port = Port(stream, rings, {Welcome: lambda message, _: self._welcome(port, message)}, store)
        port.post(messages.Hello(VERSION))
        try:
            return await port.run()
        finally:
            self._end()

    def _welcome(self, port: Port, message: Welcome) -> None:
        if message.version != VERSION:
            raise WireError(f"the engine process runs version {message.version}; this front runs {VERSION}")
        if self.terms and [kept(terms) for terms in message.models] != [kept(terms) for terms in self.terms]:
            raise ModelsChanged("the engine process has loaded other models than before")
        self.load_s = self._clock() - self._ended_at
        self.terms = message.models
        self._port = port
        self._silent_s = 0.0
        port.take(
            {
                messages.Admitted: lambda message, _: self._answer(message.request, None),
                messages.Refused: lambda message, _: self._answer(message.request, unpack_error(message.error)),
                messages.Credit: lambda message, _: (
                    self._model(message).lane(message.lane).credit.give_back(message.count)
                ),
                messages.Rows: self._take_rows,
                messages.Failed: self._fail,
                messages.State: lambda message, _: self._take_state(message),
                messages.Clear: lambda message, _: self._clear_images(message),
                messages.Leaving: lambda *_: self._note_leaving(),
            }
        )
        self.welcomed.set()
        self._came_back.set()

    def _note_leaving(self) -> None:
        self.is_leaving = True

    def _end(self) -> None:
        """Fail all requests: nothing comes from the engine process any more."""
        self._ended_at = self._clock()
        self._port = None
        if self._came_back.is_set():  # otherwise requests wait on it: this line has never been welcome
            self._came_back = anyio.Event()
        error = self.absent()
        self.reject(error)
        for _, ticket in list(self._requests.values()):
            ticket.fail(error)
        for model in self.models:
            model.end()

    def add(self, model: RemoteModel) -> None:
        """Add the next model that this front has opened."""
        self.models.append(model)
        if (state := self._states.get(len(self.models) - 1)) is not None:
            model.take_state(state)

    def reject(self, error: StagedPoolError, number: int | None = None) -> None:
        """Reject the requests that have asked to enter, whatever the engine process answers.

        Args:
            error: The error.
            number: Number of the model that they are for. None: any.
        """
        for request, asked in self._asked.items():
            if number in (None, asked.number) and not asked.woken.is_set():
                asked.error = error
                asked.woken.set()
                self.leave(request)

    def silence(self) -> str | None:
        """Return the reason if the engine process has said nothing for too long; else None."""
        if self._port is None or self._silent_s <= SILENT_S:
            return None
        return f"the engine process has said nothing for {self._silent_s:.1f} s"

    def _take_state(self, message: messages.State) -> None:
        self._silent_s = 0.0
        if self._is_open(message):
            self._model(message).take_state(message)
        self._states[message.model] = message

    def _clear_images(self, message: messages.Clear) -> None:
        if self._is_open(message):
            self._model(message).clear_images()

    def _is_open(self, message: Any) -> bool:
        """Return False if the model of a message is still being opened here."""
        return not len(self.models) <= message.model < len(self.terms)

    async def wait_for_engine(self, timeout_s: float) -> None:
        """Wait for an engine process that is away, as long as patience lasts.

        Raises:
            EngineStopped: It has not come back.
        """
        if self._port is None:
            with anyio.move_on_after(min(self._patience_s, timeout_s)):
                await self._came_back.wait()
        if self._port is None:
            raise self.absent()

    def absent(self) -> EngineStopped:
        """Return the error of a request while there is no engine process."""
        return EngineStopped(f"{ABSENT[0].upper()}{ABSENT[1:]}.", retry_after_s=self.load_s)

    def post(self, message: messages.Message) -> None:
        """Send a message; drop it if there is no line."""
        if self._port is not None:
            self._port.post(message)

    @property
    def has_store(self) -> bool:
        """True if the line has a store, in which large arrays may be put."""
        return self._port is not None and self._port.has_store

    async def put(self, parts: Sequence[Bytes]) -> bytes | None:
        """Put arrays into the store of the line; see `Port.put`."""
        return None if self._port is None else await self._port.put(parts)

    def post_items(
        self,
        message: Callable[[messages.BlockName | None, int], messages.Items],
        parts: Sequence[Bytes],
        stored: bytes | None = None,
    ) -> None:
        """Send items with their arrays; see `Port.post_arrays`."""
        if self._port is not None:
            self._port.post_arrays(message, parts, stored)

    def close(self) -> None:
        """End the line once everything that was posted is sent."""
        if self._port is not None:
            self._port.close()

    def beat(self) -> None:
        """Count silence, and give back shared memory that is read. Call it every `BEAT_S`."""
        self._silent_s += BEAT_S
        if self._port is not None:
            self._port.give_back()

    async def ask(self, number: int, arriving: Arriving, *, waits: bool) -> int:
        """Ask the engine process to admit a request of a model.

        Returns:
            The number of the request.

        Raises:
            StagedPoolError: It is not admitted.
        """
        if self._port is None:
            raise self.absent()
        request, asked = next(self._numbers), _Asked(number)
        self._asked[request] = asked
        timeout_s, request_class = arriving.timeout_s, arriving.request_class
        self.post(
            messages.Admit(
                request,
                number,
                arriving.body_bytes,
                None if timeout_s > FAR_S else timeout_s,
                request_class.priority,
                cast("str | None", request_class.tenant),
                arriving.images,
                waits,
            )
        )
        try:
            with anyio.move_on_after(timeout_s):
                await asked.woken.wait()
        except BaseException:
            self.leave(request)
            raise
        finally:
            del self._asked[request]
        if not asked.woken.is_set():
            self.leave(request)
            late = "The time limit of the request passed before the engine process had admitted it."
            raise DeadlineExceeded(late, stage=ADMISSION)
        if asked.error is not None:
            raise detached(asked.error)
        return request

    def count(self, request: int, model: RemoteModel, ticket: Ticket, inputs: Mapping[Lane, int]) -> None:
        """Tell the engine process the inputs of a decoded request."""
        self._requests[request] = model, ticket
        trace = ticket.timeline.trace
        self.post(messages.Count(request, dict(inputs), None if trace is None else trace.packed))

    def leave(self, request: int, *, answered: bool = False, elsewhere_s: float = 0.0, rejected: bool = False) -> None:
        """Tell the engine process that a request has left."""
        if (found := self._requests.pop(request, None)) is not None:
            found[0].forget(found[1])
        self.post(messages.Leave(request, answered, max(0.0, elsewhere_s), rejected))

    @property
    def is_asked(self) -> bool:
        """True if a request waits for the answer of the engine process."""
        return bool(self._asked)

    def _answer(self, request: int, error: StagedPoolError | None) -> None:
        asked = self._asked.get(request)
        if asked is not None and not asked.woken.is_set():  # otherwise its caller has left, or has its error
            asked.error = error
            asked.woken.set()

    def _model(self, message: Any) -> RemoteModel:
        if not 0 <= message.model < len(self.models):
            raise WireError(f"the engine process speaks of a model {message.model}, which does not exist")
        found: RemoteModel = self.models[message.model]
        return found

    def _take_rows(self, message: messages.Rows, block_of: Callable[[], Block]) -> None:
        block = block_of()
        model = self._model(message)
        for key, plain, queue_s, device_s in zip(
            message.keys, message.rows, message.queue_s, message.device_s, strict=True
        ):
            values = unpack_row(plain, block)

            def row_of(payload: Payload, values: Mapping[Output, Values] = values) -> Row:
                model.row_limits.check(values, payload)
                return Row(values, payload)

            if (found := self._requests.get(key[0])) is not None:
                model.take_row(found[1], key, row_of, queue_s, device_s)
        model.take_fed(message.fed)

    def _fail(self, message: messages.Failed, _: object) -> None:
        if (found := self._requests.get(message.request)) is None:
            return
        error, ticket = unpack_error(message.error), found[1]
        if message.index is not None:
            if message.index >= ticket.timeline.items and not ticket.settled:
                raise WireError(f"the engine process speaks of an input {message.index}, which does not exist")
            ticket.fail_input(message.index, error)
        elif isinstance(error, DeadlineExceeded):
            ticket.expire(error.stage)
        else:
            ticket.fail(error)


class ModelsChanged(Exception):
    """The engine process has other models than before: this front must be started anew."""


def kept(terms: ModelTerms) -> tuple[object, ...]:
    """Return the terms that a front has built its engine on."""
    card = replace(terms.card, load_s=0.0, memory_tokens=None)
    return card, terms.preparation, terms.fed_limits
