"""Pipelines of engines and functions: the outcome of one stage feeds the next, item by item."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

from staged_pool.runtime import arguments
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.memory.answers import AnswerMemory
from staged_pool.runtime.pipelines.build import BuiltStage, build_stages
from staged_pool.runtime.pipelines.declaration import PipelineStage
from staged_pool.runtime.pipelines.door import Door
from staged_pool.runtime.pipelines.items import ItemError, Outcome, PipelineItem, PipelineResult
from staged_pool.runtime.pipelines.output import output_of
from staged_pool.runtime.pipelines.references import NAME, REQUEST
from staged_pool.runtime.pipelines.run import Give, PipelineRun
from staged_pool.runtime.pipelines.source import Items
from staged_pool.runtime.pipelines.statistics import PipelineStatistics
from staged_pool.runtime.pipelines.stream import ItemStream
from staged_pool.runtime.pipelines.window import Window
from staged_pool.runtime.results import Usage
from staged_pool.runtime.threads.function_threads import FunctionThreads
from staged_pool.stages.errors import ConfigError, InvalidInput
from staged_pool.stages.log import get_logger
from staged_pool.stages.offload import Offload
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.trace import Trace

FUNCTION_THREADS: Final = 4
"""Threads of the plain functions of a pipeline, those included in which a function hangs."""

DEFAULT_WINDOW: Final = 64
"""Items between the first stage and the last."""

log = get_logger("staged_pool.pipelines")


class Pipeline:
    """A chain of stages, through which the items of a request go one by one.

    Each item is a task of its own, in the scope of the caller: a slow item holds up no other one. There is one window
    for the whole pipeline, and one for each stage. Engines take turns fairly, and reject nothing inside: overload is
    decided at the door of the pipeline. A pipeline owns no task, and needs no end: each request ends with its caller.

    Args:
        stages: The stages. A function stands for a stage of its name.
        name: Name of the pipeline.
        window: Most items between the first stage and the last, of all requests together.
        max_requests: Most requests at once. More are rejected with `Overloaded`.
        items: Field of the request that holds the items. A list of several, or anything else as one item.
        output: What becomes the output of an item: a reference, such as `vectors.dense`, or several by name. None: the
            value of the last stage.
        engines: Engines by name, for stages that name theirs.
        clock: Returns the time in seconds.
        offload: Runs plain functions. None: `FUNCTION_THREADS` threads.

    Raises:
        ConfigError: A stage is wrong, or does not fit the others or its model.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage | Callable[..., Any]],
        *,
        name: str = "pipeline",
        window: int = DEFAULT_WINDOW,
        max_requests: int = DEFAULT_WINDOW,
        items: str = "data",
        output: str | Mapping[str, str] | None = None,
        engines: Mapping[str, Engine] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        offload: Offload | None = None,
    ) -> None:
        check_limits(name=name, items=items, window=window, max_requests=max_requests)
        self.name: Final = name
        self.items: Final = items
        self._clock = clock
        self._window = Window(name, window)
        self._threads = FunctionThreads(FUNCTION_THREADS, _log_left)
        self._offload = offload or self._threads
        self._stages = build_stages(stages, engines or {}, window=window, offload=self._offload)
        self._segments = _segments(self._stages)
        self._best = [stage.declared.top_k for stage in self._stages if stage.declared.top_k is not None]
        self._output = output_of(output, [stage.name for stage in self._stages])
        self._fields = dict.fromkeys(
            each.path[0] for stage in self._stages for each in stage.inputs if each.source == REQUEST
        )
        """Fields of the request that stages read."""
        self._door = Door(name, max_requests, self._window, clock)

    @property
    def stages(self) -> Sequence[PipelineStage]:
        """The stages, in order."""
        return [stage.declared for stage in self._stages]

    @property
    def fields(self) -> Sequence[str]:
        """Fields of a request, beside its items, that stages read."""
        return [name for name in self._fields if name != self.items]

    async def submit(
        self,
        data: object,
        *,
        timeout_s: float = math.inf,
        priority: Priority | str = Priority.INTERACTIVE,
        tenant: Hashable = None,
        trace: Trace | None = None,
        answer: AnswerMemory | None = None,
    ) -> PipelineResult:
        """Take one request through the pipeline, and return the outcome of its items.

        If cancelled, no stage begins further work on it, and its places are free at once. A plain function that runs is
        left behind: nobody waits for it, and it keeps its thread until it ends.

        Args:
            data: A list of items, one item, or the fields of the request: a mapping with the items in `data` (see
                `items` of the class), and what else stages read, such as `query`.
            timeout_s: Time limit, in seconds.
            priority: `interactive` or `bulk`, as for `Engine.embed`.
            tenant: Owner of the request, as for `Engine.embed`.
            trace: Notes the times in each stage, on the clock of the pipeline.
            answer: Memory of the outcomes, which its owner gives back. None: they are the caller's.

        Raises:
            Overloaded: The pipeline has too many requests, and no work was done; or outcomes hold too much memory.
            EngineStopped: The pipeline drains, or an engine stopped.
            DeadlineExceeded: `timeout_s` passed, or cannot be met.
            InvalidInput: The data is wrong. If it is an item, the error has its index.
            StagedPoolError: An item failed in a stage with `on_error="fail"`.
            Exception: The iterator of the items has raised it.
        """
        outcomes: list[tuple[tuple[int, ...], Outcome]] = []
        count = 0

        async def give(order: tuple[int, ...], outcome: Outcome, size: int) -> None:
            if answer is not None:
                answer.keep(size, left=max(0, count - len(outcomes) - 1))
            outcomes.append((order, outcome))

        entered = self._entered(data, give, answer, timeout_s=timeout_s, priority=priority, tenant=tenant, trace=trace)
        with entered as (run, items):
            count = min([len(items), *self._best]) if isinstance(items, Sequence) else 0
            await run.run(items)
        ordered = [outcome for _, outcome in sorted(outcomes, key=lambda pair: pair[0])]
        return PipelineResult(
            items=tuple(outcome for outcome in ordered if isinstance(outcome, PipelineItem)),
            errors=tuple(outcome for outcome in ordered if isinstance(outcome, ItemError)),
            usage=Usage(run.tokens),
            stage_s=dict(run.stage_s),
        )

    @asynccontextmanager
    async def stream(
        self,
        data: object,
        *,
        timeout_s: float = math.inf,
        priority: Priority | str = Priority.INTERACTIVE,
        tenant: Hashable = None,
        trace: Trace | None = None,
        answer: AnswerMemory | None = None,
    ) -> AsyncIterator[ItemStream]:
        """Take one request through the pipeline, and give each outcome as it comes.

            async with pipeline.stream(texts) as outcomes:
                async for outcome in outcomes:
                    ...

        At most `window` items are in flight or not read yet, so the items may be an iterable without end. A slow reader
        holds up its own request alone. Leaving the block ends the request.

        Args:
            data: As for `submit`; the items may be any iterable or async iterable.
            timeout_s: See `submit`.
            priority: See `submit`.
            tenant: See `submit`.
            trace: See `submit`.
            answer: See `submit`. An outcome counts until it is read, and waits for room before. One that would not fit
                alone fails the request with `TooLarge`.

        Raises:
            StagedPoolError: As for `submit`: at the beginning of the block, or from the iteration.
            Exception: The iterator of the items has raised it. It comes behind the outcomes of the items before it.
        """
        unread = Window("unread", self._window.limit)
        stream = ItemStream(unread, answer, arguments.priority(priority))
        entered = self._entered(
            data, stream.give, answer, timeout_s=timeout_s, priority=priority, tenant=tenant, trace=trace, unread=unread
        )
        with entered as (run, items):
            async with stream.filled_by(run, items):
                yield stream

    async def drain(self, timeout_s: float) -> None:
        """Take no more requests, and wait until none is in flight. After `timeout_s` seconds, fail the rest."""
        await self._door.drain(timeout_s)

    def statistics(self) -> PipelineStatistics:
        """Return a snapshot of the pipeline."""
        stages = tuple(stage.meter.snapshot(stage.name, stage.window) for stage in self._stages)
        return self._door.snapshot(stages, left=self._threads.left)

    @contextmanager
    def _entered(
        self,
        data: object,
        give: Give,
        answer: AnswerMemory | None,
        *,
        timeout_s: float,
        priority: Priority | str,
        tenant: Hashable,
        trace: Trace | None,
        unread: Window | None = None,
    ) -> Iterator[tuple[PipelineRun, Items]]:
        """Let a request in for a block, or reject it."""
        arguments.time_limit(timeout_s)
        urgency = arguments.priority(priority)
        fields, items = self._request(data)
        run = PipelineRun(
            self._segments,
            self._window,
            fields=fields,
            output=self._output,
            give=give,
            bytes_of=None if answer is None else lambda value: answer.bytes_of(value, self._offload),
            deadline=self._clock() + timeout_s,
            clock=self._clock,
            priority=urgency,
            tenant=tenant,
            unread=unread,
            trace=trace,
        )
        with self._door.entered(run):
            yield run, items

    def _request(self, data: object) -> tuple[Mapping[str, object], Items]:
        """Return the fields of a request that stages read, and its items.

        Raises:
            InvalidInput: A field is missing.
        """
        given = data if isinstance(data, Mapping) else {self.items: data}
        for name in (self.items, *self._fields):
            if name not in given:
                raise InvalidInput(f"The request needs the field `{name}`, which the pipeline reads.", param=name)
        items = given[self.items]
        if isinstance(items, str | bytes | bytearray | memoryview | Mapping) or not isinstance(
            items, Sequence | Iterator | AsyncIterable
        ):
            items = [items]
        return {name: given[name] for name in self._fields}, items


def _log_left(calls: int) -> None:
    log.warning("pipeline.functions_left", calls=calls, limit=FUNCTION_THREADS)


def check_limits(*, name: object, items: object, window: object, max_requests: object) -> None:
    """Check the settings of a pipeline that no stage has.

    Raises:
        ConfigError: A name is none, or a limit is not a whole number of at least 1.
    """
    for key, limit in (("window", window), ("max_requests", max_requests)):
        if type(limit) is not int or limit < 1:
            raise ConfigError(f"{key} = {limit!r}: must be a whole number of at least 1")
    for key, text in (("name", name), ("items", items)):
        if not isinstance(text, str) or NAME.fullmatch(text) is None:
            raise ConfigError(f"{key} = {text!r}: must be a name of letters, digits, _ and -")


def _segments(stages: Sequence[BuiltStage]) -> Sequence[Sequence[BuiltStage]]:
    """Cut the stages behind each one with `top_k`."""
    segments: list[list[BuiltStage]] = [[]]
    for stage in stages:
        segments[-1].append(stage)
        if stage.declared.top_k is not None:
            segments.append([])
    return segments
