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
from staged_pool.runtime.admission.accounting import DEFAULT_CLASS, RequestClass, Reservation
from staged_pool.runtime.admission.controller import Admission
from staged_pool.runtime.caching.fingerprints import SharingScopes
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine_api import EngineApi
from staged_pool.runtime.engine.host_loop import HostLoop
from staged_pool.runtime.engine.lanes import LaneLimits, LaneParts, lane_service_time
from staged_pool.runtime.engine.pipeline import POSTPROCESS_WORKERS, Pipeline
from staged_pool.runtime.media.image_completer import Fetch, ImageCompleter, reject_fetch
from staged_pool.runtime.memory.answers import AnswerMemory, expected_numbers
from staged_pool.runtime.memory.governor import UNLIMITED_BYTES, MemoryGovernor, Pressure
from staged_pool.runtime.model import Lane, Model, ModelCard, ModelInput, Tokens
from staged_pool.runtime.requests import Chat, EmbedRequest, TokenClassifyRequest, content_bytes
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
    detached,
    shortened,
)
from staged_pool.stages.exception_groups import first_error, single_errors
from staged_pool.stages.log import get_logger
from staged_pool.stages.offload import Abandonable, Offload, ThreadOffload
from staged_pool.stages.parse import Arrival
from staged_pool.stages.rows import RowStream, give_rows
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.stage import StageOptions
from staged_pool.stages.ticket import Ticket
from staged_pool.stages.timeline import Timeline
from staged_pool.stages.work import Plan, Request

A = TypeVar("A")
R = TypeVar("R")

log = get_logger("staged_pool.engine")

_SUBJECT: Final = "The engine"
"""The name of this class in errors of `HostLoop.check`."""


class Engine(EngineApi):
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
        shared_cores: int | None,
        options: StageOptions,
        memory: MemoryGovernor,
    ) -> None:
        self._host = HostLoop()
        self._config = config
        self._model = model
        self._preprocess_offloads: Mapping[Lane, Offload] = {
            "text": tokenize,
            "image": lanes["image"].preprocess if "image" in lanes else tokenize,
        }
        self._offload = offload
        self._offloads = {tokenize, offload, *(parts.preprocess for parts in lanes.values())}
        self._hangs = anyio.CancelScope(shield=True)
        """Scope of the wait for calls that do not end, once the engine stops."""
        self._clock = options.clock
        batch_tokens = config.batch_tokens(model.card.device, model.card.memory_tokens)
        self._admission = Admission(
            config,
            {lane: parts.service_time for lane, parts in lanes.items()},
            {lane: LaneLimits.of(lane, config, batch_tokens).fed_tokens for lane in lanes},
            options.clock,
            math.inf if config.split_long_inputs else model.card.max_tokens,
        )
        self._scopes_of_sharing = SharingScopes(between_tenants=config.share_between_tenants)
        self._cancelled: Counter[str] = Counter()
        self._expired: Counter[str] = Counter()
        self._tickets: dict[Ticket, Reservation] = {}
        self._scopes: dict[object, anyio.CancelScope] = {}
        """Scopes of callers who wait for room in front of parse, have a deadline, or wait for a preprocess thread."""
        self._empty = anyio.Event()
        self._broken = anyio.Event()
        self._phase = Phase.READY
        self._fault: str | None = None
        self._pipeline = Pipeline(
            config,
            model,
            accept=self._accept,
            lanes=lanes,
            completer=ImageCompleter(
                fetch, limit=config.media_limit, limit_bytes=config.max_bytes, memory=memory.budget.bodies
            ),
            offload=offload,
            shared_cores=shared_cores,
            options=options,
            gave_up=self._break,
        )
        self.memory = memory
        """The governor of this process."""
        self._admission.in_flight.room_freed = lambda lane: self._pipeline.feeds[lane].grant()

    @property
    def card(self) -> ModelCard:
        """Description of the served model."""
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
        """Reason for taking no requests, for now or for ever (see `wait_broken`); None while it takes them."""
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
        answer: AnswerMemory | None = None,
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
            answer: Account of the memory of the answer, which its owner gives back. None: it counts until this returns.

        Raises:
            Overloaded: Rejected at the door; nothing was done.
            EngineStopped: The engine drains, is stopped or is broken.
            DeadlineExceeded: `timeout_s` passed, or it could not be met.
            StagedPoolError: Any other, as `decode`, the model and `encode` raise them.
        """
        self._host.check(_SUBJECT)
        arguments.time_limit(timeout_s)
        late_at = self._clock() + timeout_s
        own = AnswerMemory(self.memory.budget.answers, tenant) if answer is None else None
        while True:
            scope_ends_at = anyio.current_effective_deadline()
            left_s = math.inf if scope_ends_at == math.inf else scope_ends_at - anyio.current_time()
            if left_s > 0:
                room, now, deadline = self._enter(body_bytes, timeout_s, RequestClass(priority, tenant), images)
                room.answer = answer or own
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
                    if own is not None:
                        own.give_back()
            await _scope_moved(scope_ends_at)
            timeout_s = late_at - self._clock()
            if timeout_s <= 0:
                raise DeadlineExceeded("The time limit of the request passed.", stage="door")

    async def _answer(self, ticket: Ticket, room: Reservation, arrival: Arrival, timeout_s: float) -> object:
        """See a request through that has been let in. However that ends, its room is given back.

        Raises:
            ScopeEnds: Its work was dropped, as the caller's scope ends too soon.
        """
        self._tickets[ticket] = room
        try:
            if timeout_s == math.inf and self._pipeline.enter_nowait(arrival):
                await ticket.wait_settled()  # the ticket wakes it, whatever happens: it takes no scope to do that
            else:
                with anyio.move_on_after(timeout_s) as self._scopes[ticket]:
                    await self._pipeline.enter(arrival)
                    await ticket.wait_settled()
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
            answered = ticket.error is None
            self._admission.leave(room, answered=answered, elsewhere_s=ticket.timeline.fetch_s)
            self._left()
            ticket.release()

    def _left(self) -> None:
        """Somebody has left the engine: it may be the last one."""
        if not (self._tickets or self._scopes):
            self._empty.set()

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
        answer: AnswerMemory | None = None,
    ) -> int:
        """Submit a request, and hand over results as they are done, in any order. Returns its tokens.

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
            answer: See `submit`. None: it counts until everything is given.

        Raises:
            StagedPoolError: As for `submit`.
        """
        self._host.check(_SUBJECT)
        rows, failure, tokens = RowStream(), None, 0
        own = AnswerMemory(self.memory.budget.answers, tenant)
        with single_errors(), own:
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
                        answer=answer or own,
                    )
                except StagedPoolError as error:
                    failure = detached(error)  # its traceback leads here, and to the body
                rows.close(keep=failure is None)
        if failure is not None:
            raise detached(failure)
        return tokens

    @property
    def expects_rejections(self) -> bool:
        """True where a request was rejected just now, and more are likely to be.

        Ask `overload` before a request is read then: a rejection becomes cheap, and what is admitted dearer.
        """
        return self._admission.expects_rejections()

    def overload(
        self,
        body_bytes: int,
        *,
        priority: Priority = Priority.INTERACTIVE,
        tenant: Hashable = None,
        images: int | None = None,
    ) -> Overloaded | None:
        """The error for a request of so many bytes, which counts as rejected; None if it would be admitted now.

        Args:
            body_bytes: Size of the body.
            priority: See `submit`.
            tenant: See `submit`.
            images: See `submit`.
        """
        return self._admission.overload(body_bytes, RequestClass(priority, tenant), images)

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
        image has vectors. Runs under the preprocess limit of its lane.

        Raises:
            InvalidInput: It cannot be tokenized, or holds the URL of an image: nothing is fetched for this.
            Unsupported: The model makes no tokens of texts, or of images.
            Overloaded, EngineStopped: As for `submit`.
        """
        tokenize = partial(self._model.tokenize, add_special_tokens=add_special_tokens)
        images = source.images if isinstance(source, Chat) else ()
        if any(isinstance(image.source, str) for image in images):
            message = "Images are not fetched to count their tokens. Send the file itself, as a data URL."
            raise InvalidInput(message, param="messages")
        _check_images(len(images), self._config.max_request_items)
        return await self._preprocess(tokenize, source, content_bytes(source), "image" if images else "text")

    async def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids, special tokens included unless they are skipped. Runs under the preprocess limit.

        Raises:
            InvalidInput: An id is not in the model's vocabulary.
            TooLarge: There are more ids than preprocess and the device hold at most, or the model reads.
            Overloaded, EngineStopped: As for `submit`.
        """
        if len(ids) > (most := max(self._config.waiting_tokens, self._model.card.max_tokens)):
            message = f"There are {len(ids)} token ids; at most {most} become one text."
            raise TooLarge(message, param="tokens")
        detokenize = partial(self._detokenize, skip_special_tokens=skip_special_tokens)
        return await self._preprocess(detokenize, ids, len(ids), "text")

    def _detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        for token in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= token < self._model.card.vocabulary:
                raise InvalidInput(f"Token id {token} is out of vocabulary", param="tokens")
        return self._model.detokenize(ids, skip_special_tokens=skip_special_tokens)

    async def _preprocess(self, function: Callable[[A], R], argument: A, body_bytes: int, lane: Lane) -> R:
        """Run what is no request of a task in a thread of preprocess; the door is the same, and so is the drain."""
        self._host.check(_SUBJECT)
        await anyio.lowlevel.checkpoint_if_cancelled()
        room, _, _ = self._enter(body_bytes, math.inf, DEFAULT_CLASS)
        try:
            with anyio.CancelScope() as self._scopes[room]:
                return await self._preprocess_offloads[lane](function, argument)
            raise EngineStopped("The engine was stopped before this request was done.")
        finally:
            del self._scopes[room]
            self._admission.leave(room)
            self._left()

    def _enter(
        self, body_bytes: int, timeout_s: float, of: RequestClass, images: int | None = None
    ) -> tuple[Reservation, float, float]:
        """Let a request in, or reject it; returns its room, the time now, and its deadline."""
        if self._phase is not Phase.READY or self.fault:
            raise EngineStopped(f"The engine takes no requests: {self.fault or f'it is {self._phase}'}.")
        if self.memory.pressure >= Pressure.REJECT:
            raise self.memory.rejection()
        now = self._clock()
        room = self._admission.enter(body_bytes=body_bytes, timeout_s=timeout_s, of=of, images=images)
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
        if "image" in lanes:
            _check_images(sum(len(given.images) for given in plan.inputs), self._config.max_request_items)
        if (room := self._tickets.get(ticket)) is not None:
            self._admission.count_items(room, lanes)
            if room.answer is not None:
                is_answer = isinstance(request, EmbedRequest | TokenClassifyRequest)
                room.answer.expect(expected_numbers(plan.inputs, room.tokens, card), in_answer=is_answer)
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
            while self._tickets or self._scopes:
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
                priority: self._pipeline.priority_statistics(priority, requests=self._admission.requests_of(priority))
                for priority in Priority
            },
            device=self._pipeline.device_statistics(),
            image_cache=self._model.image_cache,
            result_cache=None if (results := self._pipeline.results) is None else results.statistics,
        )

    def clear_image_cache(self) -> None:
        """Forget the prepared images that are kept. Those in work go to their requests, and are not kept either."""
        self._model.clear_image_cache()

    def clear_result_cache(self) -> None:
        """Forget the rows that are kept. Those in work go to their requests, and are kept again."""
        if self._pipeline.results is not None:
            self._pipeline.results.clear()

    def _save_memory(self, pressure: Pressure) -> None:
        """Take less memory while the process comes near its limit."""
        self._pipeline.save_memory(pressure >= Pressure.SMALLER_BATCHES)
        if pressure >= Pressure.SMALLER_BATCHES:
            self.clear_image_cache()
            self.clear_result_cache()

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[Engine]:
        leave = self.memory.listen(self._save_memory, lambda: bool(self._tickets or self._scopes))
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
                leave()
                owner.start_soon(self._leave_hanging_calls)

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
            self._hangs.cancel()

    async def _leave_hanging_calls(self) -> None:
        """Let the host go where a thread hangs: only its process can end that."""
        with self._hangs:
            await anyio.sleep(self._config.preprocess_alarm_s)
            log.error("engine.left_hanging_calls", calls=self._pipeline.overdue_calls())
            for offload in self._offloads:
                if isinstance(offload, Abandonable):
                    offload.abandon()

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
            ticket.fail(EngineStopped(message))
        for scope in list(self._scopes.values()):
            scope.cancel()  # its caller may still wait for room in front of parse, or for a thread


async def _scope_moved(ends_at: float) -> None:
    """Wait for the caller's scope, which ends at `ends_at`, to cancel it; return if its deadline has been moved on.

    A loop that is late passes the deadline before the scope cancels anything: that takes some turns more.
    """
    # No event tells of a scope that has moved its deadline.
    while (deadline := anyio.current_effective_deadline()) <= ends_at:  # noqa: ASYNC110
        await anyio.sleep_until(deadline)


def _check_images(images: int, limit: int) -> None:
    # Items are inputs, and a conversation is one: a short body of it could have thousands of images fetched.
    if images > limit:
        raise TooLarge(f"The request has {images} images; at most {limit} are accepted.", param="input")


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
    fetch: Fetch = reject_fetch,
    shared_cores: int | None = None,
    options: StageOptions | None = None,
    memory: MemoryGovernor | None = None,
) -> AsyncIterator[Engine]:
    """Run an engine on a model that is loaded already.

    Args:
        config: Its settings; those about loading are not looked at.
        model: See `Model`.
        device: Runs forwards, `model.card.forward_calls` at once.
        image_device: Runs those of images, as many. None: `device` does, and must then run as many of both at once.
        preprocess: Runs preprocess. None: threads, `config.preprocess_limit` of them.
        image_preprocess: Runs that of images. None: threads, `config.image_preprocess_threads` of them.
        offload: Runs the decoding of large requests and the making of large answers. None: threads.
        fetch: Gets images that are given as URLs. By default these are refused.
        shared_cores: CoreLimiter that forwards and preprocess share. None: forwards compute on a device of their own.
        options: How often a stage's workers may crash, their clock, and the class of their channels.
        memory: The governor of this process, which somebody watches by. None: memory has no limit.

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
                device=offloads[lane][0],
                preprocess=offloads[lane][1],
                service_time=lane_service_time(lane, config, model.card),
            )
            for lane in model.card.lanes
        },
        tokenize=tokenize,
        offload=offload or ThreadOffload(POSTPROCESS_WORKERS),
        fetch=fetch,
        shared_cores=shared_cores,
        options=options or StageOptions(),
        memory=memory or MemoryGovernor(UNLIMITED_BYTES),
    )
    with single_errors():
        async with engine._running():
            yield engine
