"""Latency that the server adds to a bare forward, and its event loop's CPU time.

One client sends one short text at a time; the event loop is also measured with several callers.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import anyio

from perf.tools import report
from perf.tools.client import Connection, get, post, stage_times_ms, successful
from perf.tools.servers import START_TIMEOUT_S, Options, serving
from perf.tools.texts import TextSource, embeddings_body
from perf.tools.workers import Worker, worker

TARGET_MS: Final = 1.0
STAGES_TARGET_MS: Final = 0.15
TOKENS: Final = 12

CALLERS: Final = (1, 16, 64)
"""Concurrent callers of an engine in process."""
CALLS: Final = 384
"""Calls of all callers in one block."""

_TITLES: Final = {
    "bare": "bare forward",
    "paced": "bare forward, paced",
    "http": "HTTP, /v1/embeddings",
    "null": "HTTP, /health (null)",
    "embedded": "engine.embed()",
}

PAUSE_S: Final = 0.0015
"""Pause between paced forwards in seconds, about that between two requests of a client.

A loop without pauses finds the weights in the CPU caches and its core awake; no server does.
"""

_UNTIMED: Final = 5
"""Warm-up calls at the start of each block, which are not counted."""


@dataclass(slots=True)
class Block:
    """Sequential calls of one contender."""

    latencies_ms: list[float] = field(default_factory=list)
    cpu_ms: float = 0.0
    """CPU time of the contender's own process for one call."""
    loop_ms: float = 0.0
    """CPU time of the event loop's thread for one call, if there is one."""
    stages_ms: dict[str, list[float]] = field(default_factory=dict)

    @contextlib.contextmanager
    def timed(self, calls: int) -> Iterator[Callable[[float], None]]:
        """Yield a function that records a call that has ended, given its start time."""
        cpu_before_s = time.process_time()
        yield lambda started: self.latencies_ms.append((time.perf_counter() - started) * 1e3)
        self.cpu_ms = (time.process_time() - cpu_before_s) / calls * 1e3


def _block_of(call: Callable[[], object], calls: int, pause_s: float = 0.0) -> Block:
    for _ in range(_UNTIMED):
        call()
    block = Block()
    with block.timed(calls) as ended:
        for _ in range(calls):
            if pause_s:
                time.sleep(pause_s)
            started = time.perf_counter()
            call()
            ended(started)
    return block


class HttpClient:
    """Client that repeats one request, and records the `Server-Timing` of the answers."""

    def __init__(self, port: int, request: bytes) -> None:
        self._connection = Connection(port, timeout_s=START_TIMEOUT_S)
        self._request = request

    def __call__(self, calls: int) -> Block:
        replies = []
        block = _block_of(lambda: replies.append(successful(self._connection.exchange(self._request))), calls)
        for reply in replies[_UNTIMED:]:
            for stage, ms in stage_times_ms(reply).items():
                block.stages_ms.setdefault(stage, []).append(ms)
        return block


class BareForward:
    """The model alone: `forward` on token ids, in the thread that loaded it."""

    def __init__(self, options: Options, text: str, pause_s: float) -> None:
        from staged_pool.runtime.model import ModelInput
        from staged_pool.runtime.models.load import load_model
        from staged_pool.runtime.requests import DENSE_ONLY, TextInput
        from staged_pool.stages.work import Prepared

        self._model = load_model(options.engine_config())
        prepared = self._model.preprocess([ModelInput(TextInput(text), DENSE_ONLY)])[0]
        if not isinstance(prepared, Prepared):
            raise TypeError("the text of the measurement cannot be preprocessed")
        self._ids = prepared.payload
        self._pause_s = pause_s

    def __call__(self, calls: int) -> Block:
        return _block_of(lambda: self._model.forward([self._ids]), calls, self._pause_s)


class EmbeddedEngine:
    """Engine in process, on an event loop of its own, with concurrent calls of `embed()`.

    Args:
        texts: Different texts, used in turn, because equal ones would be coalesced.
    """

    def __init__(self, options: Options, texts: Sequence[str], callers: int) -> None:
        from anyio.from_thread import start_blocking_portal

        from staged_pool.runtime.engine.open import open_engine

        uvloop = {"use_uvloop": True} if options.backend == "asyncio" else {}
        life = contextlib.ExitStack()  # as long as the process
        self._portal = life.enter_context(start_blocking_portal(options.backend, uvloop))
        opening = self._portal.wrap_async_context_manager(open_engine(options.engine_config()))
        self._engine = life.enter_context(opening)
        self._life = life
        self._texts = itertools.cycle(texts)
        self._callers = callers

    def __call__(self, calls: int) -> Block:
        return self._portal.call(self._calls, calls)

    async def _calls(self, calls: int) -> Block:
        await self._call_all(_UNTIMED * self._callers, lambda _: None)
        block = Block()
        loop_before_s = time.thread_time()
        with block.timed(calls) as ended:
            await self._call_all(calls, ended)
        block.loop_ms = (time.thread_time() - loop_before_s) / calls * 1e3
        return block

    async def _call_all(self, calls: int, ended: Callable[[float], None]) -> None:
        left = iter(range(calls))

        async def call() -> None:
            for _ in left:
                started = time.perf_counter()
                await self._engine.embed(next(self._texts))
                ended(started)

        async with anyio.create_task_group() as callers:
            for _ in range(self._callers):
                callers.start_soon(call)


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles of a difference over the rounds, in ms."""

    median: float
    quartile1: float
    quartile3: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        quartile1, median, quartile3 = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, quartile1, quartile3)

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.quartile1:.3f} .. {self.quartile3:.3f})"


def run(options: Options, *, rounds: int, calls: int, embedded: bool) -> None:
    """Measure, print and record.

    Every contender runs one block a round, in alternating order, so that the machine's noise affects all of them; the
    others are idle. The result is the median over the rounds of the difference of two medians of a round.
    """
    source = TextSource(options.model)
    words = random.Random(0)
    text = source.text(TOKENS, words)
    request = post("/v1/embeddings", embeddings_body([text]))
    settings = {"options": options, "rounds": rounds, "calls_per_block": calls, "tokens": source.tokens_of(text)}
    with report.recording("overhead", settings) as record, contextlib.ExitStack() as running:
        server = running.enter_context(serving(options.serve_command(coalesce=True)))
        record.results["model"] = server.card()
        makers: dict[str, Callable[[], Callable[[int], Block]]] = {
            "bare": partial(BareForward, options, text, 0.0),
            "paced": partial(BareForward, options, text, PAUSE_S),
            "http": partial(HttpClient, server.port, request),
            "null": partial(HttpClient, server.port, get("/health")),
        }
        if embedded:
            makers["embedded"] = partial(EmbeddedEngine, options, [text], 1)
        contenders: dict[str, Worker[int, Block]] = {}
        for name, make in makers.items():
            contenders[name] = running.enter_context(worker(make))
            # Before the next one starts, because a model that loads runs timings of its own. It is also a warm-up.
            contenders[name](calls)
        blocks = _interleave(contenders, rounds, calls)
        _report(record, blocks)
        running.close()
        if embedded:
            texts = [source.text(TOKENS, words) for _ in range(4 * max(CALLERS))]
            _report_loop(record, {callers: _busy(options, texts, callers, rounds) for callers in CALLERS})


def _interleave(contenders: dict[str, Worker[int, Block]], rounds: int, calls: int) -> dict[str, list[Block]]:
    blocks: dict[str, list[Block]] = {name: [] for name in contenders}
    with report.progress("overhead", rounds) as bar:
        for place in range(rounds):
            for name in list(contenders)[:: -1 if place % 2 else 1]:
                blocks[name].append(contenders[name](calls))
            bar.advance(bar.task_ids[0])
    return blocks


def _busy(options: Options, texts: Sequence[str], callers: int, rounds: int) -> list[Block]:
    with worker(partial(EmbeddedEngine, options, texts, callers)) as engine:
        engine(CALLS)
        return [engine(CALLS) for _ in range(rounds)]


def _report_loop(record: report.Record, blocks: dict[int, list[Block]]) -> None:
    loop_ms = {callers: Spread.of([block.loop_ms for block in own]) for callers, own in blocks.items()}
    report.show_table(
        "CPU time of the event loop for one short text, of the engine alone (ms)",
        ["callers at once", "median (quartiles)"],
        [[str(callers), str(spread)] for callers, spread in loop_ms.items()],
        note="the stages without HTTP, preprocess and forward, which are other threads'",
    )
    record.results["loop_ms"] = loop_ms
    for callers, spread in loop_ms.items():
        record.show_target(f"event loop of engine.embed(), {callers} at once", spread.median, STAGES_TARGET_MS, "ms")


def _report(record: report.Record, blocks: dict[str, list[Block]]) -> None:
    medians = {name: [statistics.median(block.latencies_ms) for block in own] for name, own in blocks.items()}
    over: dict[str, dict[str, Spread]] = {
        name: {
            reference: Spread.of([a - b for a, b in zip(medians[name], medians[reference], strict=True)])
            for reference in ("bare", "paced")
        }
        for name in ("http", "embedded")
        if name in blocks
    }
    rows = []
    for name, own in blocks.items():
        summary = report.Summary.of([ms for block in own for ms in block.latencies_ms])
        cpu_ms = statistics.median(block.cpu_ms for block in own)
        differences = [str(over[name][reference]) if name in over else "-" for reference in ("bare", "paced")]
        rows.append([_TITLES[name], *report.Summary.cells(summary), *differences, f"{cpu_ms:.3f}"])
        record.results[name] = {
            "ms": summary,
            "round_medians_ms": medians[name],
            "over_ms": over.get(name),
            "process_cpu_ms_per_call": cpu_ms,
        }
    report.show_table(
        "One client, one short text at a time (ms)",
        ["", "p50", "p99", "max", "n", "over bare: median (quartiles)", "over paced", "own CPU"],
        rows,
        note="own CPU: of the process that calls; over HTTP that is the client alone",
    )
    _report_stages(record, blocks["http"])
    for name, differences_ms in over.items():
        for reference, spread in differences_ms.items():
            record.show_target(f"{_TITLES[name]} over {_TITLES[reference]}", spread.median, TARGET_MS, "ms")


def _report_stages(record: report.Record, blocks: list[Block]) -> None:
    times_ms = {
        stage: [ms for block in blocks for ms in block.stages_ms.get(stage, [])] for stage in blocks[0].stages_ms
    }
    middles = {
        stage: {"median": statistics.median(times), "mean": statistics.fmean(times)}
        for stage, times in times_ms.items()
    }
    whole = all(ms == round(ms) for times in times_ms.values() for ms in times)
    report.show_table(
        "Where the time goes: Server-Timing (ms)",
        ["stage", "median", "mean"],
        [[stage, f"{middle['median']:.3f}", f"{middle['mean']:.3f}"] for stage, middle in middles.items()],
        note="the server's clock ticks in whole milliseconds: read the mean" if whole else "",
    )
    record.results["stages_ms"] = middles
