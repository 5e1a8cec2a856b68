"""One request on its way through a pipeline: a task for each item, in the scope of the caller."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias, TypeVar, cast

import anyio
from anyio.abc import TaskGroup

from staged_pool.runtime.pipelines.build import BuiltStage
from staged_pool.runtime.pipelines.failures import OUTPUT, PIPELINE, SOURCE, failure_by, failure_of, is_of_item
from staged_pool.runtime.pipelines.items import ItemError, Outcome, PipelineItem
from staged_pool.runtime.pipelines.moving import Moving, Ranking, behind, ranking_of
from staged_pool.runtime.pipelines.pending import PendingItems
from staged_pool.runtime.pipelines.references import ITEM, REQUEST
from staged_pool.runtime.pipelines.source import END, Items, Source
from staged_pool.runtime.pipelines.window import Window
from staged_pool.stages.errors import DeadlineExceeded, StagedPoolError, StageFailed, detached
from staged_pool.stages.exception_groups import single_errors
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.trace import Trace
from staged_pool.stages.user_code import Panic, user_code

T = TypeVar("T")

Give: TypeAlias = Callable[[tuple[int, ...], Outcome, int], Awaitable[None]]
"""Takes the outcome of an item, its place in the answer, and its bytes.

Raises `StagedPoolError` without memory."""

BytesOf: TypeAlias = Callable[[object], Awaitable[int]]
"""Counts the bytes of a value, which may be of a class of users; see `AnswerMemory.bytes_of`."""

OUTCOME_BYTES: Final = 256
"""Bytes of an outcome beside its value: itself, and its places in JSON."""

ERROR_BYTES: Final = 1024
"""Bytes of an error as the outcome of an item. Messages repeat little of what callers send."""


@dataclass(slots=True)
class _Made:
    """A value that is made once for all items of a request."""

    is_ready: anyio.Event = field(default_factory=anyio.Event)
    value: object = None


class PipelineRun:
    """One request: its claim on places in windows, the context of its steps, and the tasks of its items.

    The stages are cut into segments behind each stage with `top_k`. A segment begins when all items of the one before
    have come to its end. Items that wait there hold no place, so more of them than a window has do no harm.

    Code of users runs in the tasks of the request alone, never in that of its caller. If such a task ends unasked, the
    request fails: an answer has all its items, or there is none.

    Args:
        segments: The stages.
        window: Window of the pipeline, from the first stage to the last.
        fields: Fields of the request.
        output: Makes the output of an item from its values.
        give: Takes the outcome of each item.
        bytes_of: Counts the bytes of its output. None: nobody needs to know.
        deadline: Time after which nobody waits, on the clock.
        clock: Returns the time in seconds.
        priority: Urgency of the request.
        tenant: Owner of the request.
        unread: Bounds the items between the source and the reader of a stream, who gives their places back. An error of
            the source then comes behind the items before it. None: outcomes are taken at once.
        trace: Notes the times in each stage. None: the request is not traced.
    """

    def __init__(
        self,
        segments: Sequence[Sequence[BuiltStage]],
        window: Window,
        *,
        fields: Mapping[str, object],
        output: Callable[[Moving], object],
        give: Give,
        bytes_of: BytesOf | None,
        deadline: float,
        clock: Callable[[], float],
        priority: Priority,
        tenant: Hashable,
        unread: Window | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.priority: Final = priority
        self.tenant: Final = tenant
        self.start_tags: Final[dict[Hashable, float]] = {}
        """See `Claim.start_tags`."""
        self.tokens = 0
        """Tokens that the engines have read."""
        self.stage_s: Final[dict[str, float]] = {stage.name: 0.0 for segment in segments for stage in segment}
        """The longest time of an item in each stage, in seconds."""
        self._segments = segments
        self._window = window
        self._fields = fields
        self._output = output
        self._give = give
        self._bytes_of = bytes_of
        self._deadline = deadline
        self._clock = clock
        self._unread = unread
        self._trace = trace
        self._made: dict[Hashable, _Made] = {}
        self._failure: Exception | None = None
        self._scope = anyio.CancelScope()
        self._interrupted: set[str] = set()
        """Stages in which items were cancelled."""

    def left_s(self) -> float:
        """See `StepContext.left_s`."""
        if (left_s := self._deadline - self._clock()) <= 0:
            raise DeadlineExceeded("The time limit of the request passed.", stage=PIPELINE)
        return left_s

    def count_tokens(self, tokens: int) -> None:
        """See `StepContext.count_tokens`."""
        self.tokens += tokens

    async def once(self, key: Hashable, make: Callable[[], Awaitable[T]]) -> T:
        """See `StepContext.once`. If it fails, the request does."""
        if (made := self._made.get(key)) is None:
            made = self._made[key] = _Made()
            try:
                async with user_code():
                    made.value = await make()
            except Exception as error:  # noqa: BLE001  # code of users may raise anything
                failure = failure_by(error, "The work for all items", PIPELINE)
                self.fail(failure)
                raise failure from error.__cause__
            made.is_ready.set()
        await made.is_ready.wait()
        return cast(T, made.value)

    async def run(self, items: Items) -> None:
        """Take items through all stages. If it ends without an error, each has its outcome or has vanished.

        Raises:
            DeadlineExceeded: The deadline passed.
            StagedPoolError: An item failed, or the request as a whole.
            Exception: The source of the items has raised it.
        """
        with single_errors(), anyio.move_on_after(self._deadline - self._clock()) as late:
            await self._run(items)
        if late.cancelled_caught:
            stage = next((name for name in self.stage_s if name in self._interrupted), PIPELINE)
            message = f"The time limit of the request passed; its first items were in {stage}."
            raise DeadlineExceeded(message, stage=stage)

    async def _run(self, items: Items) -> None:
        ranked: Sequence[Moving] | None = None
        for segment in self._segments:
            way = _Way(segment, ranking_of(segment))
            with anyio.CancelScope() as self._scope:
                async with anyio.create_task_group() as way.tasks:
                    if self._failure is not None:  # it was stopped before it began
                        self._scope.cancel()
                    elif ranked is None:
                        self._start(way, self._feed, Source(items), way)
                    else:
                        self._let_in_all(ranked, 0, way)
            self._check(way)
            if way.ranking is None:
                return
            ranked = way.ranking.best()

    def _check(self, way: _Way) -> None:
        """Raise the error of a request, of which a segment has ended."""
        failure, self._failure = self._failure, None
        if failure is None and way.running:
            failure = StageFailed("A task of the request was cancelled, and nobody had asked for it.", stage=PIPELINE)
        if failure is None:
            return
        try:
            raise detached(failure) if isinstance(failure, StagedPoolError) else failure
        finally:
            del failure  # break the cycle of the error, its traceback and this frame

    def _start(self, way: _Way, task: Callable[..., Awaitable[None]], *arguments: object) -> None:
        """Start a task of the request, which must end by itself."""
        way.running += 1
        way.tasks.start_soon(self._run_task, way, task, *arguments)

    async def _run_task(self, way: _Way, task: Callable[..., Awaitable[None]], *arguments: object) -> None:
        await task(*arguments)
        way.running -= 1

    async def _feed(self, source: Source, way: _Way) -> None:
        """Let the items of the request in, one by one, as their places become free."""
        index = 0
        try:
            while (item := await source.next()) is not END:
                waiting = way.pending.add(self._first(index, item), 0)
                await self._let_in(way)
                if not waiting.let_in.is_set():  # parts were before it
                    await waiting.let_in.wait()
                index += 1
        except Panic as error:
            self.fail(failure_by(error, "The source of the items", SOURCE), at_once=self._unread is None)
        except Exception as error:  # noqa: BLE001  # the caller's own, which comes back to it as it is
            self.fail(error, at_once=self._unread is None)

    def _first(self, index: int, item: object) -> Moving:
        return Moving(index, (), (index,), {REQUEST: self._fields, ITEM: item})

    def _let_in_all(self, items: Sequence[Moving], place: int, way: _Way) -> None:
        """Let items in that are in memory already."""
        for item in items:
            way.pending.add(item, place)
        self._start(way, self._spread, len(items), way)

    async def _spread(self, count: int, way: _Way) -> None:
        for _ in range(count):
            await self._let_in(way)

    async def _let_in(self, way: _Way) -> None:
        """Take a place, and let the first waiting item in, of whatever task."""
        if self._unread is not None:
            await self._unread.enter(self)
        await self._window.enter(self)
        first = way.pending.take()
        self._start(way, self._move, first.item, first.place, way)

    async def _move(self, item: Moving, place: int, way: _Way) -> None:
        """Take an item through a segment, from a stage on. It has a place in the window, and gives it back."""
        try:
            outcome = await self._outcome(item, place, way)
        finally:
            self._window.leave()
        if outcome is not None:
            try:
                await self._give(*outcome)
            except StagedPoolError as error:  # there is no memory for it
                self.fail(error)
        elif self._unread is not None:
            self._unread.leave()

    async def _outcome(self, item: Moving, place: int, way: _Way) -> tuple[tuple[int, ...], Outcome, int] | None:
        """Take an item through the stages, and return what `Give` takes; None if there is no outcome, or not yet."""
        for at, stage in enumerate(way.stages[place:], place):
            moved = await self._through(stage, item)
            if isinstance(moved, ItemError):
                return item.order, moved, OUTCOME_BYTES + ERROR_BYTES
            if not moved:
                return None
            item, *others = moved
            if others:
                self._let_in_all(others, at + 1, way)
        if way.ranking is not None:
            way.ranking.add(item)
            return None
        try:
            with user_code():  # values of users may have fields that raise
                value = self._output(item)
            size = OUTCOME_BYTES + (0 if self._bytes_of is None else await self._bytes_of(value))
        except Exception as error:  # noqa: BLE001  # as above
            self.fail(failure_of(failure_by(error, "The output", OUTPUT), item, OUTPUT))
            return None
        return item.order, PipelineItem(index=item.index, parts=item.parts, value=value), size

    async def _through(self, stage: BuiltStage, item: Moving) -> Sequence[Moving] | ItemError:
        """Take an item through one stage. Returns what becomes of it; nothing if it vanishes."""
        began_at, declared, meter = self._clock(), stage.declared, stage.meter
        interrupted = True
        try:
            async with stage.window.place(self):
                entered_at = self._clock()
                meter.wait.observe(entered_at - began_at)
                async with user_code():
                    value = await stage.step.run([each.of(item.values) for each in stage.inputs], self)
                moved = behind(declared, item, value)
            interrupted = False
        except Exception as error:  # noqa: BLE001  # code of users may raise anything
            interrupted = False
            what = "The function of the stage" if declared.function is not None else "The stage"
            failure = failure_of(failure_by(error, what, stage.name), item, stage.name)
            if declared.on_error == "fail" or not is_of_item(failure):
                meter.failed += 1
                self.fail(failure)
                return ()
            meter.skipped += 1
            return ItemError(index=item.index, parts=item.parts, stage=stage.name, error=failure)
        finally:
            if interrupted:
                self._interrupted.add(stage.name)
            if self._trace is not None:
                self._trace.passed(f"stage {stage.name}", began_at, self._clock())
        now = self._clock()
        meter.service.observe(now - entered_at)
        meter.done += 1
        self.stage_s[stage.name] = max(self.stage_s[stage.name], now - began_at)
        return moved

    def fail(self, error: Exception, *, at_once: bool = True) -> None:
        """End the request with an error: the first one that ends it at once counts.

        Args:
            error: The error.
            at_once: Do not wait for the items on their way.
        """
        if self._failure is None or (at_once and not self._scope.cancel_called):
            self._failure = detached(error) if isinstance(error, StagedPoolError) else error
        if at_once:
            self._scope.cancel()


@dataclass(slots=True)
class _Way:
    """A segment of the stages, and the tasks of the items in it."""

    stages: Sequence[BuiltStage]
    ranking: Ranking | None
    pending: PendingItems = field(default_factory=PendingItems)
    running: int = 0
    """Tasks that have not ended by themselves."""
    tasks: TaskGroup = field(init=False)
