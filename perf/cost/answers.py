"""Lag of the event loop while a thread encodes a large answer: 2,048 vectors of 1,024 values."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import anyio
import anyio.to_thread
import numpy as np
import orjson

from perf.tools import report
from perf.tools.servers import Backend
from staged_pool.api.wire.chunked_json import Pieces
from staged_pool.api.wire.dialects.openai import encode_embeddings
from staged_pool.api.wire.encodings import Encoding
from staged_pool.runtime.results import EmbedResult, Usage

ROWS: Final = 2048
WIDTH: Final = 1024
TICK_S: Final = 0.001
TARGET_MS: Final = 5.0

_ENCODINGS: Final[Mapping[str, Encoding]] = {
    "float": Encoding(),
    "base64": Encoding("base64"),
    "base64 of bfloat16": Encoding("base64", "bfloat16"),
    "base64 of fp8_e4m3": Encoding("base64", "fp8_e4m3"),
    "int8": Encoding("float", "int8"),
    "binary": Encoding("float", "binary"),
    "bytes": Encoding("bytes"),
    "bytes of float16": Encoding("bytes", "float16"),
}
_WITHOUT_LOCK: Final = "numpy alone"
_IN_ONE_CALL: Final = "float, in one call"


@dataclass(slots=True)
class Work:
    """Work of one contender, and the lag of the event loop meanwhile."""

    delays_ms: list[float] = field(default_factory=list)
    took_ms: list[float] = field(default_factory=list)
    answer_bytes: int = 0


def run(*, backend: Backend, rounds: int) -> None:
    """Measure, print and record.

    Contenders alternate, in alternating order. Two of them are references. A busy thread without the GIL shows the lag
    that the machine itself causes. One that encodes all numbers in one call shows the lag without steps.
    """
    settings = {"backend": backend, "rounds": rounds, "rows": ROWS, "width": WIDTH, "tick_s": TICK_S}
    with report.recording("answers", settings) as record:
        uvloop = {"use_uvloop": True} if backend == "asyncio" else {}
        work = anyio.run(_measure, _contenders(), rounds, backend=backend, backend_options=uvloop)
        _report(record, work)


def _contenders() -> dict[str, Callable[[], int]]:
    vectors = np.random.default_rng(0).standard_normal((ROWS, WIDTH), np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    result = EmbedResult(dense=vectors, usage=Usage(ROWS), model="model")
    return {
        _WITHOUT_LOCK: partial(_without_lock, vectors),
        _IN_ONE_CALL: lambda: len(orjson.dumps(list(vectors), option=orjson.OPT_SERIALIZE_NUMPY)),
        **{name: partial(_write, result, encoding) for name, encoding in _ENCODINGS.items()},
    }


def _write(result: EmbedResult, encoding: Encoding) -> int:
    written = encode_embeddings(result, {"": encoding}, request_id="id", created=0)
    return _length(written if isinstance(written, bytes | tuple) else written.content)


def _length(body: Pieces) -> int:
    return len(body) if isinstance(body, bytes) else sum(map(len, body))


def _without_lock(vectors: np.typing.NDArray[np.float32]) -> int:
    until = time.perf_counter() + 0.15
    space = np.empty_like(vectors)
    while time.perf_counter() < until:
        np.sin(vectors, out=space)
    return 0


async def _measure(contenders: Mapping[str, Callable[[], int]], rounds: int) -> dict[str, Work]:
    work = {name: Work() for name in contenders}
    for contender in contenders.values():
        contender()  # loads the parts that load at the first use
    for place in range(rounds):
        for name in list(contenders)[:: -1 if place % 2 else 1]:
            await _measure_one(contenders[name], work[name])
    return work


async def _measure_one(contender: Callable[[], int], work: Work) -> None:
    started = time.perf_counter()
    ended = anyio.Event()

    async def call() -> None:
        work.answer_bytes = await anyio.to_thread.run_sync(contender)
        work.took_ms.append((time.perf_counter() - started) * 1e3)
        ended.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)
        while not ended.is_set():
            asleep = time.perf_counter()
            await anyio.sleep(TICK_S)
            work.delays_ms.append((time.perf_counter() - asleep - TICK_S) * 1e3)


def _report(record: report.Record, work: Mapping[str, Work]) -> None:
    rows = []
    for name, own in work.items():
        delay, took = report.Summary.of(own.delays_ms), report.Summary.of(own.took_ms)
        record.results[name] = {"delay_ms": delay, "took_ms": took, "answer_bytes": own.answer_bytes}
        late = sum(ms > TARGET_MS for ms in own.delays_ms) / len(own.delays_ms)
        took_ms = "-" if took is None else report.number(took.p50)
        rows.append([name, f"{own.answer_bytes / 1e6:.1f}", took_ms, *report.Summary.cells(delay), f"{late:.1%}"])
    columns = ["", "MB", "takes", "p50", "p99", "max", "n", f"over {TARGET_MS:g} ms"]
    note = f"{_WITHOUT_LOCK}: what the machine itself delays; a timer may be a millisecond late by itself"
    report.show_table("How late the event loop is while an answer is written (ms)", columns, rows, note)
    for name in _ENCODINGS:
        record.show_target(f"{name}, p99", float(np.percentile(work[name].delays_ms, 99)), TARGET_MS, "ms")
