"""The engine: it takes requests of any task, and answers each exactly once."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar, cast

import anyio
import anyio.lowlevel

from staged_pool.runtime import arguments
from staged_pool.runtime.admission.accounting import Arriving, RequestClass
from staged_pool.runtime.card import Lane, ModelCard
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.encode_api import EncodeApi
from staged_pool.runtime.engine.engine_stages import EngineStages
from staged_pool.runtime.engine.entrance import Entrance
from staged_pool.runtime.engine.followed_requests import FollowedRequests, wait_for_scope
from staged_pool.runtime.engine.host_loop import HostLoop
from staged_pool.runtime.engine.lanes import LaneParts, admission_of
from staged_pool.runtime.engine.lifecycle import Lifecycle
from staged_pool.runtime.engine.plugin_api import PluginApi
from staged_pool.runtime.engine.reports import CountingCompleter, Reports
from staged_pool.runtime.engine.request_planner import RequestPlanner
from staged_pool.runtime.engine.token_api import TokenApi
from staged_pool.runtime.engine.visits import Visits
from staged_pool.runtime.memory.answers import AnswerMemory
from staged_pool.runtime.memory.governor import MemoryGovernor
from staged_pool.runtime.model import Preparer
from staged_pool.runtime.plugins.model import PluginModel
from staged_pool.runtime.remote.model import RemoteModel
from staged_pool.runtime.statistics import EngineLoad, EngineStatistics
from staged_pool.runtime.tasks.plan import plan as plan_task
from staged_pool.stages.errors import ADMISSION, DeadlineExceeded, Overloaded, ScopeEnds, StagedPoolError, detached
from staged_pool.stages.exception_groups import single_errors
from staged_pool.stages.offload import Offload
from staged_pool.stages.rows import RowStream, given_rows
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.stage import StageOptions
from staged_pool.stages.ticket import Ticket
from staged_pool.stages.timeline import Timeline
from staged_pool.stages.work import Request

A = TypeVar("A")
R = TypeVar("R")


class Engine(EncodeApi, TokenApi, PluginApi, Visits):
    """Takes requests, and answers each exactly once. Made by `open_engine` or `run_engine`.

    All methods belong to the event loop that runs the engine. Awaited in another one, they raise `RuntimeError`.
    """

    memory: MemoryGovernor
    """The memory governor of this process."""

    def __init__(
        self,
        config: EngineConfig,
        model: Preparer,
        *,
        lanes: Mapping[Lane, LaneParts],
        tokenize: Offload,
        offload: Offload,
        completer: CountingCompleter,
        shared_cores: int | None,
        options: StageOptions,
        memory: MemoryGovernor,
        remote: RemoteModel | None = None,
    ) -> None:
        self._host = HostLoop("The engine")
        self._config = config
        self._model = model
        self._tokenize = tokenize
        self._lanes = lanes
        self._offload = offload
        self._clock = options.clock
        self.memory = memory
        self._admission = (
            admission_of(config, model.card, {lane: parts.service_time for lane, parts in lanes.items()}, options.clock)
            if remote is None
            else remote.account
        )
        plan = model.plan if isinstance(model, PluginModel) else lambda _, request: plan_task(request, model.card)
        count_items = self._admission.count_ticket if remote is None else remote.count_ticket
        self._planner = RequestPlanner(config, model.card, count_items, plan, None if remote is None else remote.secret)
        self._stages = EngineStages(
            config,
            model,
            accept=self._planner.plan,
            lanes=lanes,
            completer=completer,
            offload=offload,
            shared_cores=shared_cores,
            options=options,
            remote=remote,
        )
        self._planner.obstruction = self._stages.obstruction
        self._admission.in_flight.fed_tokens_freed = lambda lane: self._stages.feeds[lane].grant()
        self._entrance = remote or Entrance(self._admission, options.clock)
        self._remote = remote
        self._admission.in_flight.room_freed = self._entrance.grant
        self._requests = FollowedRequests(self._stages, self._entrance, options.clock)
        offloads = {tokenize, offload, *(parts.preprocess for parts in lanes.values())}
        self._life = Lifecycle(config, self._stages, self._requests, offloads, memory)
        self._reports = Reports(
            config,
            model,
            admission=self._admission,
            stages=self._stages,
            requests=self._requests,
            life=self._life,
            clock=options.clock,
            completer=completer,
            offloads={"preprocess": tokenize, "answers": offload},
            remote=remote,
        )
        self.plugins: Mapping[str, Engine] = {}
        self._entrance.check_open = self._life.check_open

    @property
    def card(self) -> ModelCard:
        """Description of the served model."""
        return self._model.card

    @property
    def config(self) -> EngineConfig:
        """Settings of the engine."""
        return self._config

    @property
    def fault(self) -> str | None:
        """Reason for taking no requests, for now or for ever (see `wait_broken`); None if there is none."""
        return self._life.fault

    @property
    def is_away(self) -> bool:
        """True while its engine process is started anew. A request waits for that, though not for long."""
        return self._remote is not None and self._remote.is_away

    async def wait_broken(self) -> str:
        """Wait until the engine can serve no more. Returns the reason; empty if it was stopped in order."""
        self._host.check()
        return await self._life.wait_broken()

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
        waits: bool = False,
    ) -> R:
        """Take one request through the four stages and return its answer.

        The request is first admitted or rejected. If cancelled, it is abandoned: its reservation is given back at once,
        and no stage begins further work on it. Work that cannot be done within the caller's own scope is dropped early.

        Args:
            decode: Makes the request, in parse; in a thread if it is large. Runs again if work was dropped too early.
            encode: Makes the answer from the result, in postprocess; in a thread if it is large.
            body_bytes: Size of the bytes that `decode` reads.
            timeout_s: Time limit of the request, in seconds from now.
            timeline: Filled in with the times of each stage.
            priority: Urgency of the request.
            tenant: Owner of the request. Tenants share the device fairly; None is a tenant, too.
            images: Number of images in the bytes of the request, for admission. None: unknown.
            stream: Gets the rows of `Engine.stream`. Work is then never dropped early for the caller's scope.
            answer: Memory of the answer, which its owner gives back. None: it counts until this returns.
            waits: Wait for room, in fair order, and never raise `Overloaded`. For requests of a few inputs.

        Raises:
            Overloaded: Rejected at admission; no work was done.
            EngineStopped: The engine drains, is stopped or is broken.
            DeadlineExceeded: `timeout_s` passed, or cannot be met.
            StagedPoolError: Any other error of `decode`, the model or `encode`.
        """
        self._host.check()
        arguments.time_limit(timeout_s)
        with AnswerMemory(self.memory.budget.answers, tenant) if answer is None else nullcontext(answer) as held:
            late_at = self._clock() + timeout_s
            while timeout_s > 0:
                scope_ends_at, now = anyio.current_effective_deadline(), self._clock()
                if (left_s := scope_ends_at - anyio.current_time()) > 0:
                    ticket_of = partial(
                        Ticket,
                        decode,
                        encode,
                        deadline=late_at,
                        scope_ends_at=now + left_s if stream is None else math.inf,
                        timeline=timeline,
                        priority=priority,
                        tenant=tenant,
                        stream=stream,
                    )
                    arriving = Arriving(body_bytes, timeout_s, RequestClass(priority, tenant), images)
                    try:
                        return cast(R, await self._requests.submit(arriving, ticket_of, held, waits=waits))
                    except ScopeEnds:
                        await wait_for_scope(scope_ends_at)  # it ends now, or its deadline has moved
                    except Overloaded:
                        if not waits:
                            raise
                        await self._requests.wait_for_room(held, priority, late_at)
                else:
                    await wait_for_scope(scope_ends_at)
                timeout_s = late_at - self._clock()
        raise DeadlineExceeded("The time limit of the request passed.", stage=ADMISSION)

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
        """Submit a request, and give its results as they are done, in any order. Returns its tokens.

        Neither a stage nor a drain waits for `give`: with its last row the request has left the engine, even if results
        are still to be given. An error is raised after the running call of `give`. What `give` and `write` raise ends
        the request: an `Exception` as it is, anything else as `StageFailed`.

        Args:
            decode: See `submit`.
            write: Makes an output from indices in the request's result, and a result of these alone. Runs in a thread.
            give: Takes each output, one call at a time.
            body_bytes: See `submit`.
            timeout_s: Time limit for the last row, in seconds from now.
            timeline: See `submit`.
            priority: See `submit`.
            tenant: See `submit`.
            images: See `submit`.
            answer: See `submit`. None: it counts until all results are given.

        Raises:
            StagedPoolError: As for `submit`.
        """
        self._host.check()
        rows, failure, tokens = RowStream(), None, 0
        own = AnswerMemory(self.memory.budget.answers, tenant)
        with single_errors(), own:
            async with given_rows(rows, self._offload, write, give):
                try:
                    tokens = await self.submit(
                        decode,
                        lambda tokens: tokens,
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
                    failure = detached(error)  # its traceback would keep the body alive
                rows.close(keep=failure is None)
        if failure is not None:
            raise detached(failure)
        return tokens

    @property
    def expects_rejections(self) -> bool:
        """True if a request was rejected just now, and more are likely to be.

        Ask `overload` before a request is read then: this makes rejections cheap, and admitted requests dearer.
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
        """Return the error of a request that is rejected now, and count it; else None.

        Args:
            body_bytes: Size of the body.
            priority: See `submit`.
            tenant: See `submit`.
            images: See `submit`.
        """
        return self._admission.overload(body_bytes, RequestClass(priority, tenant), images)

    def check_model(self, name: str | None) -> None:
        """See `RequestPlanner.check_model`."""
        self._planner.check_model(name)

    async def _run_preprocess(self, call: Callable[[A], R], argument: A, body_bytes: int, lane: Lane) -> R:
        """Run a call of no task in a preprocess thread. Admission and a drain count it like a request."""
        self._host.check()
        await anyio.lowlevel.checkpoint_if_cancelled()
        offload = self._lanes[lane].preprocess if lane in self._lanes else self._tokenize
        return await self._requests.run_call(Arriving(body_bytes), offload, call, argument)

    async def drain(self, timeout_s: float) -> None:
        """Stop admitting requests at once, and wait until no request is in flight.

        After `timeout_s` seconds the requests that are still in flight fail with `EngineStopped`.
        """
        self._host.check()
        await self._life.drain(timeout_s)

    def statistics(self) -> EngineStatistics:
        """Return a snapshot of the engine. It waits for no stage, however busy they are."""
        return self._reports.statistics()

    def load(self) -> EngineLoad:
        """Return the load of the last seconds, for a router; cheap enough for every answer."""
        return self._reports.load()

    @property
    def stall(self) -> str | None:
        """Reason if a forward runs far longer than predicted; else None. Requests are taken all the same."""
        return self._stages.stall()

    def clear_image_cache(self) -> None:
        """Drop the cached images. Images in preprocess go to their requests, and are not cached."""
        self._stages.clear_image_cache()

    def clear_result_cache(self) -> None:
        """Drop the cached rows. Rows under way go to their requests, and are cached again."""
        self._stages.clear_result_cache()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Engine]:
        """Run the engine for a block; see `run_engine`."""
        async with self._life.running():
            yield self
