"""The engine: a door in front of the pipeline, and the life of both from loading to the drain."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar, cast

import anyio
import anyio.lowlevel
from anyio.abc import TaskStatus

from staged_pool.runtime import arguments
from staged_pool.runtime.admission import Admission
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.errands import Fetch, refuse
from staged_pool.runtime.face import EngineTasks
from staged_pool.runtime.gate import Gate
from staged_pool.runtime.host_loop import HostLoop
from staged_pool.runtime.identity import SharingScopes
from staged_pool.runtime.inside import ANYBODY, Asker, Room
from staged_pool.runtime.lanes import LaneParts, lane_pace
from staged_pool.runtime.model import Lane, Model, ModelCard, ModelInput, Tokens
from staged_pool.runtime.pipeline import PARSE_WORKERS, POSTPROCESS_WORKERS, Pipeline
from staged_pool.runtime.requests import Chat, content_bytes
from staged_pool.runtime.statistics import EngineStatistics, Phase
from staged_pool.runtime.tasks.plan import plan as plan_request
from staged_pool.stages.errors import (
    Abandoned,
    DeadlineExceeded,
    EngineStopped,
    InvalidInput,
    NoInputs,
    Overloaded,
    ScopeEnds,
    StagedPoolError,
    TooLarge,
    UnknownModel,
    shortened,
)
from staged_pool.stages.groups import first_error, single_errors
from staged_pool.stages.log import get_logger
from staged_pool.stages.offload import Offload, ThreadOffload
from staged_pool.stages.parse import Arrival
from staged_pool.stages.rows import RowStream, give_rows
from staged_pool.stages.stage import StageOptions
from staged_pool.stages.ticket import Ticket, Timeline
from staged_pool.stages.work import Item, Plan, Priority, Request

A = TypeVar("A")
R = TypeVar("R")

log = get_logger("staged_pool.engine")

_SUBJECT: Final = "The engine"
"""What belongs to an event loop; see `HostLoop.check`."""


class Engine(EngineTasks):
    """Takes requests, and answers each exactly once. Made by `open_engine` or `run_engine`.

    All methods belong to the event loop that runs the engine; awaited in another one, they raise `RuntimeError`.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        *,
        lanes: Mapping[Lane, LaneParts],
        tokenize: Offload,
        offload: Offload,
        fetch: Fetch,
        cores: int | None,
        options: StageOptions,
    ) -> None:
        self._host = HostLoop()
        self._config = config
        self._model = model
        self._preprocess_offloads: Mapping[Lane, Offload] = {
            "text": tokenize,
            "image": lanes["image"].preprocess if "image" in lanes else tokenize,
        }
        self._offload = offload
        self._clock = options.clock
        self._admission = Admission(config, {lane: parts.pace for lane, parts in lanes.items()}, options.clock)
        self._scopes_of_sharing = SharingScopes(between_tenants=config.share_between_tenants)
        self._cancelled: Counter[str] = Counter()
        self._expired: Counter[str] = Counter()
        self._tickets: dict[Ticket, Room] = {}
        self._scopes: dict[Ticket, anyio.CancelScope] = {}
        """Of callers who wait for room in front of parse, or have a deadline."""
        self._empty = anyio.Event()
        self._broken = anyio.Event()
        self._phase = Phase.READY
        self._fault: str | None = None

        batch_tokens = config.batch_tokens(model.card.device, model.card.memory_tokens)
        on_device = 2 * model.card.forward_workers * batch_tokens  # and on the way to it
        self._gate = Gate(config.waiting_tokens + on_device, PARSE_WORKERS)
        """For texts. Pictures are fed by their callers in turns, and one that is being fetched must hold up nobody."""
        self._pipeline = Pipeline(
            config,
            model,
            accept=self._accept,
            lanes=lanes,
            fetch=fetch,
            offload=offload,
            cores=cores,
            options=options,
            expects_refusals=self._admission.expects_refusals,
            gave_up=self._break,
        )

    @property
    def card(self) -> ModelCard:
        """What the served model is."""
        return self._model.card

    @property
    def config(self) -> EngineConfig:
        """The settings that it runs with."""
        return self._config

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def fault(self) -> str | None:
        """Why the engine takes no requests, for now or for ever (see `wait_broken`); None while it does."""
        return self._fault or self._pipeline.obstruction()

    async def wait_broken(self) -> str:
        """Wait until the engine can serve no more; returns the reason."""
        self._host.check(_SUBJECT)
        await self._broken.wait()
        return self._fault or ""

    async def submit(
        self,
        decode: Callable[[], Request],
        encode: Callable[[Any], R],
        *,
        body_bytes: int = 0,
        timeout_s: float = math.inf,
        timeline: Timeline | None = None,
        priority: Priority = Priority.INTERACTIVE,
        tenant: Hashable = None,
        images: int | None = None,
        stream: RowStream | None = None,
    ) -> R:
        """Take one request through the four stages and return its answer.

        The request is admitted or rejected before anything else happens. Cancellation abandons it: its room is free at
        once, no stage begins further work on it, and what a stage has begun is dropped when it ends. Of the deadline
        of the caller's own scope the engine only takes notice: work that cannot be done by then is dropped, and the
        scope does the cancelling.

        Args:
            decode: Makes the request out of what the caller holds; run in parse, off the event loop if large. It is
                run again if the caller moves the deadline of its scope after work was dropped for it.
            encode: Makes the answer out of the result of the request's task; run in postprocess, off the event loop
                if large.
            body_bytes: Size of what `decode` reads.
            timeout_s: Seconds from now after which the answer is of no use.
            timeline: Filled in with the times of each stage.
            priority: How it stands to other requests that want the device; see `Priority`.
            tenant: Whose it is. Tenants share the device fairly, however many requests each has, and the requests of a
                tenant share what it gets. None is a tenant, too.
            images: Images that the bytes of the request show, by which it is judged before it is decoded. None: not
                known.
            stream: For `stream`, below. Its rows are given once, so no deadline of a scope drops its work early.

        Raises:
            Overloaded: Rejected at the door; nothing was done.
            EngineStopped: The engine drains, is stopped or is broken.
            DeadlineExceeded: `timeout_s` passed, or it could not be met.
            StagedPoolError: Any other, as `decode`, the model and `encode` raise them.
        """
        self._host.check(_SUBJECT)
        arguments.time_limit(timeout_s)
        late_at = self._clock() + timeout_s
        while True:
            scope_ends_at = anyio.current_effective_deadline()
            left_s = math.inf if scope_ends_at == math.inf else scope_ends_at - anyio.current_time()
            if left_s > 0:
                room, now, deadline = self._enter(body_bytes, timeout_s, Asker(priority, tenant), images)
                ticket = Ticket(
                    decode,
                    encode,
                    room,
                    deadline=deadline,
                    scope_ends_at=now + left_s if stream is None else math.inf,
                    timeline=timeline,
                    priority=priority,
                    tenant=tenant,
                    stream=stream,
                )
                try:
                    return cast(R, await self._answer(ticket, room, Arrival(ticket, body_bytes, now), timeout_s))
                except ScopeEnds:
                    pass
                finally:
                    del ticket  # as in `Ticket.wait`
            await _scope_moved(scope_ends_at)
            timeout_s = late_at - self._clock()
            if timeout_s <= 0:
                raise DeadlineExceeded("The time limit of the request passed.", stage="door")

    async def _answer(self, ticket: Ticket, room: Room, arrival: Arrival, timeout_s: float) -> object:
        """See a request through that has been let in. However that ends, its room is given back.

        Raises:
            ScopeEnds: Its work was dropped, as the caller's scope ends too soon.
        """
        self._tickets[ticket] = room
        try:
            has_passed = room.lane != "text" or room.asker == ANYBODY or self._gate.enter_nowait(ticket, room.tokens)
            if timeout_s == math.inf and has_passed and self._pipeline.enter_nowait(arrival):
                await self._see_through(ticket)  # the ticket wakes it, whatever happens: it takes no scope to do that
            else:
                with anyio.move_on_after(timeout_s) as self._scopes[ticket]:
                    if not has_passed:
                        await self._gate.enter(ticket, room.tokens)
                    await self._pipeline.enter(arrival)
                    await self._see_through(ticket)
                if not ticket.settled:
                    late = f"The request was not answered within {timeout_s:g} s; it was in the {ticket.stage} stage."
                    ticket.fail(DeadlineExceeded(late, stage=ticket.stage))
            return await ticket.wait()
        finally:
            # Left by cancellation of any kind, the ticket is still open: this is what abandons it.
            if ticket.fail(Abandoned("the caller left")):
                self._cancelled[ticket.stage] += 1
            elif isinstance(ticket.error, DeadlineExceeded | ScopeEnds):
                self._expired[ticket.error.stage] += 1
            del self._tickets[ticket]
            self._scopes.pop(ticket, None)
            self._gate.leave(ticket)
            answered = ticket.error is None
            self._admission.leave(room, answered=answered, elsewhere_s=ticket.timeline.fetch_s)
            if not self._tickets:
                self._empty.set()
            ticket.release()
            del ticket, arrival  # as in `Ticket.wait`

    async def _see_through(self, ticket: Ticket) -> None:
        """Wait until it is settled, and do what parse leaves to the caller."""
        if errands := await ticket.errands():
            await self._pipeline.errands.run(ticket, cast("Sequence[Item[ModelInput]]", errands))

    async def stream(
        self,
        decode: Callable[[], Request],
        write: Callable[[Sequence[int], Any], R],
        give: Callable[[R], Awaitable[None]],
        *,
        body_bytes: int = 0,
        timeout_s: float = math.inf,
        timeline: Timeline | None = None,
        priority: Priority = Priority.INTERACTIVE,
        tenant: Hashable = None,
        images: int | None = None,
    ) -> int:
        """As `submit`, and hand over results as they are done, in any order. Returns the tokens of the request.

        No stage waits for `give`, and neither does a drain: once the last row is there the request has left the
        engine, however much of it is still to be given. An error comes after the call of `give` that runs.

        Args:
            decode: See `submit`.
            write: Makes what is given out of places in the request's result, and a result of these alone; in a thread.
            give: Takes it; one call at a time.
            body_bytes: See `submit`.
            timeout_s: The last row is of no use after so many seconds.
            timeline: See `submit`.
            priority: See `submit`.
            tenant: See `submit`.
            images: See `submit`.

        Raises:
            StagedPoolError: As for `submit`.
        """
        self._host.check(_SUBJECT)
        rows, failure, tokens = RowStream(), None, 0
        with single_errors():
            async with anyio.create_task_group() as giving:
                giving.start_soon(give_rows, rows, self._offload, write, give)
                try:
                    tokens = await self.submit(
                        decode,
                        _itself,
                        body_bytes=body_bytes,
                        timeout_s=timeout_s,
                        timeline=timeline,
                        priority=priority,
                        tenant=tenant,
                        images=images,
                        stream=rows,
                    )
                except StagedPoolError as error:
                    failure = error
                rows.close(keep=failure is None)
        if failure is None:
            return tokens
        try:
            raise failure
        finally:
            del failure  # as in `Ticket.wait`

    @property
    def expects_refusals(self) -> bool:
        """Whether somebody was refused just now, and more of them are likely to be: then it is worth to ask `overload`
        before a request is read, which makes a refusal cheap, and what is let in dearer."""
        return self._admission.expects_refusals()

    def overload(
        self,
        body_bytes: int,
        *,
        priority: Priority = Priority.INTERACTIVE,
        tenant: Hashable = None,
        images: int | None = None,
    ) -> Overloaded | None:
        """Why a request of so many bytes would be refused now; None if it would be let in. It counts as refused.

        Args:
            body_bytes: Size of the body.
            priority: See `submit`.
            tenant: See `submit`.
            images: See `submit`.
        """
        return self._admission.overload(body_bytes, Asker(priority, tenant), images)

    def check_model(self, name: str | None) -> None:
        """Refuse a request for a model that is not served here. None and "" mean whichever is.

        Raises:
            UnknownModel: It is another one.
        """
        if name and name != self._model.card.name:
            served = self._model.card.name
            raise UnknownModel(f"The model `{shortened(name)}` does not exist. Served: {served}", param="model")

    async def tokenize(self, source: str | Chat, *, add_special_tokens: bool = True) -> Tokens:
        """The token ids of a text or a conversation, and what each stands for; an image token is there as often as its
        picture has vectors. Runs under the preprocess limit of its lane.

        Raises:
            InvalidInput: It cannot be tokenized, or holds the URL of a picture: nothing is fetched for this.
            Unsupported: The model makes no tokens of texts, or of pictures.
            Overloaded, EngineStopped: As for `submit`.
        """
        tokenize = partial(self._model.tokenize, add_special_tokens=add_special_tokens)
        images = source.images if isinstance(source, Chat) else ()
        if any(isinstance(image.source, str) for image in images):
            message = "Pictures are not fetched to count their tokens. Send the file itself, as a data URL."
            raise InvalidInput(message, param="messages")
        _check_pictures(len(images), self._config.max_request_items)
        return await self._preprocess(tokenize, source, content_bytes(source), "image" if images else "text")

    async def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids, special tokens included unless they are skipped. Runs under the preprocess limit.

        Raises:
            InvalidInput: An id is not in the model's vocabulary.
            Overloaded, EngineStopped: As for `submit`.
        """
        detokenize = partial(self._detokenize, skip_special_tokens=skip_special_tokens)
        return await self._preprocess(detokenize, ids, len(ids), "text")

    def _detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        for token in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= token < self._model.card.vocabulary:
                raise InvalidInput(f"Token id {token} is out of vocabulary", param="tokens")
        return self._model.detokenize(ids, skip_special_tokens=skip_special_tokens)

    async def _preprocess(self, function: Callable[[A], R], argument: A, body_bytes: int, lane: Lane) -> R:
        """Run what is no request of a task in a thread of preprocess; the door is the same."""
        self._host.check(_SUBJECT)
        await anyio.lowlevel.checkpoint_if_cancelled()
        room, _, _ = self._enter(body_bytes, math.inf, ANYBODY)
        try:
            return await self._preprocess_offloads[lane](function, argument)
        finally:
            self._admission.leave(room)

    def _enter(
        self, body_bytes: int, timeout_s: float, asker: Asker, images: int | None = None
    ) -> tuple[Room, float, float]:
        """Let a request in, or reject it; returns its room, the time now, and its deadline."""
        if self._phase is not Phase.READY or self.fault:
            raise EngineStopped(f"The engine takes no requests: {self.fault or f'it is {self._phase}'}.")
        now = self._clock()
        room = self._admission.enter(body_bytes=body_bytes, timeout_s=timeout_s, asker=asker, images=images)
        return room, now, now + timeout_s

    def _accept(self, ticket: Ticket, request: Request) -> Plan[ModelInput]:
        """What parse asks of a decoded request: how this model does it, within this server's limits."""
        card = self._model.card
        self.check_model(request.model)
        plan = plan_request(request, card)
        if not plan.inputs:
            raise NoInputs("The request has no inputs; at least one is needed.", param="input")
        lanes: Mapping[Lane, int] = (
            {card.lanes[0]: len(plan.inputs)} if len(card.lanes) == 1 else Counter(given.lane for given in plan.inputs)
        )
        if len(card.lanes) > 1 and (obstruction := self._pipeline.obstruction(lanes)):  # else the door has seen it
            raise EngineStopped(f"The engine takes no requests of this kind: {obstruction}.")
        if "text" not in lanes:
            self._gate.leave(ticket)
        if "image" in lanes:
            _check_pictures(sum(len(given.images) for given in plan.inputs), self._config.max_request_items)
        if (room := self._tickets.get(ticket)) is not None:
            self._admission.count_items(room, lanes)
        ticket.sharing_scope = scope = self._scopes_of_sharing.scope(ticket.tenant, request.cache_salt)
        if scope is None or "image" not in lanes or not self._config.image_cache_mb:
            return plan
        return replace(plan, inputs=[replace(given, sharing_scope=scope) for given in plan.inputs])

    async def drain(self, timeout_s: float) -> None:
        """Close the door at once, and wait until everything inside has its outcome.

        What has none after `timeout_s` seconds fails with `EngineStopped`.
        """
        self._host.check(_SUBJECT)
        if self._phase is Phase.READY:
            self._phase = Phase.DRAINING
            log.info("engine.draining", requests=len(self._tickets))
        with anyio.move_on_after(timeout_s):
            while self._tickets:
                if self._empty.is_set():  # never replaced while somebody waits: there may be several drains
                    self._empty = anyio.Event()
                await self._empty.wait()
        self._fail_all("The engine was stopped before this request was done.")

    def statistics(self) -> EngineStatistics:
        """Everything at this moment. Touches no stage, so it answers however busy they are."""
        return EngineStatistics(
            phase=self._phase,
            fault=self.fault,
            admission=self._admission.statistics(),
            cancelled=dict(self._cancelled),
            expired=dict(self._expired),
            overdue_preprocess_calls=self._pipeline.overdue_calls(),
            stages=self._pipeline.stage_statistics(),
            priorities={
                priority: self._pipeline.priority_statistics(
                    priority, requests=self._admission.requests_of(priority), at_gate=self._gate.waiting(priority)
                )
                for priority in Priority
            },
            device=self._pipeline.device_statistics(),
            image_cache=self._model.image_cache,
            result_cache=None if (results := self._pipeline.results) is None else results.statistics,
        )

    def clear_image_cache(self) -> None:
        """Forget the prepared pictures that are kept. Those in work go to their requests, and are not kept either."""
        self._model.clear_image_cache()

    def clear_result_cache(self) -> None:
        """Forget the rows that are kept. Those in work go to their requests, and are kept again."""
        if self._pipeline.results is not None:
            self._pipeline.results.clear()

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[Engine]:
        async with anyio.create_task_group() as owner:
            try:
                await owner.start(self._run_pipeline)
                yield self
                await self.drain(self._config.drain_timeout_s)
            except BaseException:
                owner.cancel_scope.cancel()
                raise
            finally:
                self._phase = Phase.STOPPED
                self._pipeline.close()
                self._fail_all("The engine is stopped.")

    async def _run_pipeline(self, *, task_status: TaskStatus[None]) -> None:
        try:
            await self._pipeline.run(task_status=task_status)
        except* anyio.BrokenResourceError:
            pass  # from a stage whose neighbour has ended: that one has said why, or everything is being cancelled
        except* Exception as group:  # noqa: BLE001  # a stage that gave up ends the engine, but not its host
            self._break(group)
        finally:
            self._phase = Phase.STOPPED
            self._fail_all("The engine is stopped.")  # a host that is cancelled may take its time to leave the block

    def _break(self, error: Exception) -> None:
        """Serve no more. Called as soon as a stage gives up, however long the calls that still run may take."""
        if self._phase is Phase.STOPPED:  # broken already; or stopped, which breaks channels under those who send
            return
        self._fault = fault = str(first_error(error))
        self._phase = Phase.STOPPED
        log.error("engine.broken", fault=fault, requests=len(self._tickets))
        self._fail_all(f"The engine is broken: {fault}.")
        self._broken.set()

    def _fail_all(self, message: str) -> None:
        for ticket in list(self._tickets):
            if ticket.fail(EngineStopped(message)) and (scope := self._scopes.get(ticket)) is not None:
                scope.cancel()  # its caller may still wait for room in front of parse


async def _scope_moved(ends_at: float) -> None:
    """Wait for the caller's scope, which ends at `ends_at`, to cancel it; return if its deadline has been moved on.

    A loop that is late passes the deadline before the scope cancels anything: that takes some turns more.
    """
    # No event tells of a scope that has moved its deadline.
    while (deadline := anyio.current_effective_deadline()) <= ends_at:  # noqa: ASYNC110
        await anyio.sleep_until(deadline)


def _check_pictures(pictures: int, limit: int) -> None:
    # Items are inputs, and a conversation is one: a short body of it could have thousands of pictures fetched.
    if pictures > limit:
        raise TooLarge(f"The request has {pictures} pictures; at most {limit} are accepted.", param="input")


def _itself(tokens: int) -> int:
    return tokens


@asynccontextmanager
async def run_engine(
    config: EngineConfig,
    model: Model,
    *,
    device: Offload,
    image_device: Offload | None = None,
    preprocess: Offload | None = None,
    image_preprocess: Offload | None = None,
    offload: Offload | None = None,
    fetch: Fetch = refuse,
    cores: int | None = None,
    options: StageOptions | None = None,
) -> AsyncIterator[Engine]:
    """Run an engine on a model that is loaded already.

    Args:
        config: Its settings; those about loading are not looked at.
        model: See `Model`.
        device: Runs forwards, `model.card.forward_calls` at once.
        image_device: Runs those of pictures, as many. None: `device` does, and must then run as many of both at once.
        preprocess: Runs preprocess. None: threads, `config.preprocess_limit` of them.
        image_preprocess: Runs that of pictures. None: threads, `config.image_preprocess_threads` of them.
        offload: Runs the decoding of large requests and the making of large answers. None: threads.
        fetch: Gets pictures that are given as URLs. By default these are refused.
        cores: What forwards and preprocess share, one each. None: forwards run elsewhere.
        options: How often a stage's workers may crash, and a hook into the seams of the stages.

    At the end of the block the engine drains; if the block raised or was cancelled, it stops.
    """
    tokenize = preprocess or ThreadOffload(config.preprocess_limit)
    offloads: dict[Lane, tuple[Offload, Offload]] = {
        "text": (device, tokenize),
        "image": (image_device or device, image_preprocess or ThreadOffload(config.image_preprocess_threads)),
    }
    engine = Engine(
        config,
        model,
        lanes={
            lane: LaneParts(
                device=offloads[lane][0], preprocess=offloads[lane][1], pace=lane_pace(lane, config, model.card)
            )
            for lane in model.card.lanes
        },
        tokenize=tokenize,
        offload=offload or ThreadOffload(POSTPROCESS_WORKERS),
        fetch=fetch,
        cores=cores,
        options=options or StageOptions(),
    )
    with single_errors():
        async with engine._running():
            yield engine
