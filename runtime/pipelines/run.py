"""One request on its way through a pipeline: a task for each item, in the scope of the caller."""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias, TypeVar, cast

import anyio
from anyio.abc import TaskGroup

from staged_pool.runtime.pipelines.build import BuiltStage
from staged_pool.runtime.pipelines.failures import OUTPUT, PIPELINE, failure_of, is_of_item
from staged_pool.runtime.pipelines.items import ItemError, Outcome, PipelineItem
from staged_pool.runtime.pipelines.moving import Moving, Ranking, behind, ranking_of
from staged_pool.runtime.pipelines.references import ITEM, REQUEST
from staged_pool.runtime.pipelines.window import Window
from staged_pool.stages.errors import DeadlineExceeded, StagedPoolError, detached
from staged_pool.stages.exception_groups import single_errors
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.trace import Trace

T = TypeVar("T")

Items: TypeAlias = Iterable[object] | AsyncIterable[object]

Give: TypeAlias = Callable[[tuple[int, ...], Outcome], Awaitable[None]]
"""Takes the outcome of an item, with its place in the order of the answer."""


@dataclass(slots=True)
class _Made:
    """A value that is made once for all items of a request."""

    is_ready: anyio.Event = field(default_factory=anyio.Event)
    value: object = None


class PipelineRun:
    """One request: its claim on places in windows, the context of its steps, and the tasks of its items.

    The stages are cut into segments behind each stage with `top_k`. A segment begins when all items of the one before
    have come to its end. Items that wait there hold no place, so more of them than a window has do no harm.

    Args:
        segments: The stages.
        window: Window of the pipeline, from the first stage to the last.
        fields: Fields of the request.
        output: Makes the output of an item from its values.
        give: Takes the outcome of each item.
        deadline: Time after which nobody waits, on the clock.
        clock: Returns the time in seconds.
        priority: Urgency of the request.
        tenant: Owner of the request.
        unread: Bounds the items between the feed and the reader of a stream. None: outcomes are taken at once.
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
        self._deadline = deadline
        self._clock = clock
        self._unread = unread
        self._trace = trace
        self._made: dict[Hashable, _Made] = {}
        self._failure: StagedPoolError | None = None
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
                made.value = await make()
            except StagedPoolError as error:
                self.fail(error)
                raise
            made.is_ready.set()
        await made.is_ready.wait()
        return cast(T, made.value)

    async def run(self, items: Items) -> None:
        """Take items through all stages. If it ends without an error, each has its outcome or has vanished.

        Raises:
            DeadlineExceeded: The deadline passed.
            StagedPoolError: An item failed, or the request as a whole.
        """
        with single_errors(), anyio.move_on_after(self._deadline - self._clock()):
            ranked: Sequence[Moving] | None = None
            for segment in self._segments:
                ranking = ranking_of(segment)
                with anyio.CancelScope() as self._scope:
                    async with anyio.create_task_group() as tasks:
                        way = _Way(segment, ranking, tasks)
                        await (self._feed(items, way) if ranked is None else self._spread(ranked, 0, way))
                if self._failure is not None:
                    raise detached(self._failure)
                if ranking is None:
                    return
                ranked = ranking.best()
        stage = next((name for name in self.stage_s if name in self._interrupted), PIPELINE)
        raise DeadlineExceeded(f"The time limit of the request passed; its first items were in {stage}.", stage=stage)

    async def _feed(self, items: Items, way: _Way) -> None:
        """Let the items of the request in, one by one, as their places become free."""
        index = 0
        if isinstance(items, AsyncIterable):
            async for item in items:
                await self._let_in(self._first(index, item), 0, way)
                index += 1
        else:
            for item in items:
                await self._let_in(self._first(index, item), 0, way)
                index += 1

    def _first(self, index: int, item: object) -> Moving:
        return Moving(index, (), (index,), {REQUEST: self._fields, ITEM: item})

    async def _spread(self, items: Sequence[Moving], place: int, way: _Way) -> None:
        """Let items in that come from others. They go before new ones: their values are in memory already."""
        for item in items:
            await self._let_in(item, place, way, urgent=True)

    async def _let_in(self, item: Moving, place: int, way: _Way, *, urgent: bool = False) -> None:
        if self._unread is not None:
            await self._unread.enter(self, urgent=urgent)
        await self._window.enter(self, urgent=urgent)
        way.tasks.start_soon(self._move, item, place, way)

    async def _move(self, item: Moving, place: int, way: _Way) -> None:
        """Take an item through a segment, from a stage on. It has a place in the window, and gives it back."""
        outcome: Outcome | None = None
        try:
            for at, stage in enumerate(way.stages[place:], place):
                moved = await self._through(stage, item)
                if isinstance(moved, ItemError):
                    outcome = moved
                    break
                if not moved:
                    break
                item, *others = moved
                if others:
                    way.tasks.start_soon(self._spread, others, at + 1, way)
            else:
                if way.ranking is None:
                    outcome = PipelineItem(index=item.index, parts=item.parts, value=self._output(item))
                else:
                    way.ranking.add(item)
        except StagedPoolError as error:  # of the output
            self.fail(failure_of(error, item, OUTPUT))
        finally:
            self._window.leave()
        if outcome is not None:
            await self._give(item.order, outcome)
        if self._unread is not None:
            self._unread.leave()

    async def _through(self, stage: BuiltStage, item: Moving) -> Sequence[Moving] | ItemError:
        """Take an item through one stage. Returns what becomes of it; nothing if it vanishes."""
        began_at, declared, meter = self._clock(), stage.declared, stage.meter
        interrupted = True
        try:
            async with stage.window.place(self):
                entered_at = self._clock()
                meter.wait.observe(entered_at - began_at)
                value = await stage.step.run([each.of(item.values) for each in stage.inputs], self)
                moved = behind(declared, item, value)
            interrupted = False
        except StagedPoolError as error:
            interrupted = False
            failure = failure_of(error, item, stage.name)
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

    def fail(self, error: StagedPoolError) -> None:
        """End the request with an error. The first one counts."""
        if self._failure is None:
            self._failure = detached(error)
            self._scope.cancel()


@dataclass(frozen=True, slots=True)
class _Way:
    """A segment of the stages, and the tasks of the items in it."""

    stages: Sequence[BuiltStage]
    ranking: Ranking | None
    tasks: TaskGroup
