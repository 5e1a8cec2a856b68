"""Jobs of tests: files of batch lines, the work of a double, and what the output says."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from staged_pool.api.bulk.batch_lines import BatchAnswer, BatchAnswers, BatchLine
from staged_pool.api.bulk.job import Progress, Summary, Window
from staged_pool.api.bulk.opening import BATCH_WINDOW, Existing, job_files, open_batch
from staged_pool.api.bulk.parts import Work


def request(name: str, text: str = "text", url: str = "/v1/embeddings", **fields: Any) -> dict[str, Any]:
    """Return a line of a batch."""
    return {"custom_id": name, "method": "POST", "url": url, "body": {"input": text, **fields}}


async def write_lines(path: Path, lines: Iterable[object]) -> None:
    """Write lines of JSON; a text or bytes as they are."""
    await anyio.Path(path).write_bytes(b"".join(line_of(line) + b"\n" for line in lines))


def line_of(line: object) -> bytes:
    """Return a line of JSON; a text or bytes as they are."""
    return line if isinstance(line, bytes) else line.encode() if isinstance(line, str) else json.dumps(line).encode()


def read_now(path: Path) -> list[Any]:
    """Return the lines of JSON in a file."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]


async def read_lines(path: Path) -> list[Any]:
    """Return the lines of JSON in a file, on an event loop."""
    return await anyio.to_thread.run_sync(read_now, path)


async def names(folder: Path) -> list[str]:
    """Return the names of the files in a folder, in order."""
    return sorted([path.name async for path in anyio.Path(folder).iterdir()])


class EchoWork:
    """Work double: answers with the text of each line, after `before` lets it."""

    def __init__(self, before: Callable[[BatchLine], Awaitable[None]] | None = None) -> None:
        self.answers = BatchAnswers("echo")
        self.asked: list[str | None] = []
        self._before = before

    async def do(self, lines: Sequence[BatchLine]) -> Sequence[BatchAnswer]:
        answers = []
        for line in lines:
            self.asked.append(line.custom_id)
            if self._before is not None:
                await self._before(line)
            if line.fault is None:
                answers.append(self.answers.answered(line, 200, line.body))
            else:
                answers.append(self.answers.refused(line, line.fault))
        return answers


class Reports(list[Progress]):
    """The progress of a job, in order."""

    def __call__(self, progress: Progress) -> None:
        self.append(progress)


async def run(
    folder: Path,
    work: Work[BatchLine, BatchAnswer],
    *,
    errors: bool = False,
    existing: Existing = "reject",
    window: Window = BATCH_WINDOW,
    report: Callable[[Progress], None] = lambda progress: None,
    stop: anyio.Event | None = None,
    **identity: Any,
) -> Summary:
    """Run the job of `in.jsonl` in a folder, to `out.jsonl` and perhaps `errors.jsonl`."""
    opening = partial(
        open_batch,
        source=folder / "in.jsonl",
        output=folder / "out.jsonl",
        errors=folder / "errors.jsonl" if errors else None,
        identity=identity,
        existing=existing,
    )
    async with job_files(opening) as job:
        return await job.run(work, window=window, report=report, stop=stop)
