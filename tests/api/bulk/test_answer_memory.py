"""Memory of the answers of lines: waited for, never computed for in vain, and held until they are written."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from staged_pool.api.app.batch_work import BatchWork
from staged_pool.api.bulk.batch_lines import BatchAnswer, BatchAnswers, BatchLine
from staged_pool.api.bulk.job import Progress
from staged_pool.api.bulk.opening import BATCH_WINDOW, job_files, open_batch
from staged_pool.runtime.memory.answers import WRITTEN_NUMBER_BYTES
from staged_pool.runtime.memory.budget import ByteAccount
from tests.servers.in_memory import serving_in_memory
from tests.support.cards import EMBEDDER
from tests.support.gates import Gate
from tests.support.model import LetterModel
from tests.support.waiting import until

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore:Async generator 'httpx:ResourceWarning"),  # the client's own, on trio
]

TEXT = "abcdefgh" * 16
TEXTS = 6
LINE_NUMBERS = 2 * len(TEXT) * TEXTS
"""Numbers of the token vectors of a line."""
LINE_BYTES = LINE_NUMBERS * WRITTEN_NUMBER_BYTES


@asynccontextmanager
async def working(model: LetterModel, limit_bytes: int) -> AsyncIterator[tuple[BatchWork, ByteAccount]]:
    """Run an engine whose answers may hold some bytes, and the work on it.

    Its card does not tell the width of token vectors: how much an answer takes is known once it is computed.
    """
    async with serving_in_memory(model) as served:
        account = served.engine.memory.budget.answers
        account.limit_bytes = limit_bytes
        yield BatchWork(served.registry, BatchAnswers("job"), auto_truncate=True), account
        assert account.held_bytes == account.waiting == 0


def line(number: int, texts: int = TEXTS) -> BatchLine:
    """Make a line that asks for token vectors."""
    inputs = [f"{number} {place} {TEXT}"[: len(TEXT)] for place in range(texts)]
    return BatchLine(number, f"r{number}", "/pooling", json.dumps({"input": inputs, "task": "token_embed"}).encode())


def body_of(answer: BatchAnswer) -> Any:
    """Return the response of a line."""
    return json.loads(b"".join(answer.pieces()))["response"]


async def test_a_line_that_can_never_fit_fails_by_itself_and_is_computed_once() -> None:
    model = LetterModel(EMBEDDER)
    async with working(model, LINE_BYTES // 2) as (work, _):
        with anyio.fail_after(20):
            (answer,) = await work.do([line(0)])
        assert (answer.failed, body_of(answer)["status_code"]) == (True, 413)
        assert "send fewer inputs" in str(body_of(answer)["body"])
        assert len({text for batch in model.forwarded for text in batch}) <= TEXTS
        answer.give_back()


async def test_lines_that_fit_one_by_one_are_all_answered_without_computing_for_ever() -> None:
    """Each takes more than half: of two at once, none would ever have its last row."""
    model, lines = LetterModel(EMBEDDER), 4
    answers: dict[int, BatchAnswer] = {}

    async def ask(number: int) -> None:
        (answer,) = await work.do([line(number)])
        answers[number] = answer
        answer.give_back()  # as if written at once

    async with working(model, LINE_BYTES * 5 // 4) as (work, _), anyio.create_task_group() as tasks:
        with anyio.fail_after(60):
            for number in range(lines):
                tasks.start_soon(ask, number)
            await until(lambda: len(answers) == lines)
        assert {body_of(answer)["status_code"] for answer in answers.values()} == {200}
        computed = [text for batch in model.forwarded for text in batch]
        assert len(computed) <= 4 * lines * TEXTS, "a rejected line is computed again a few times at most"


async def test_a_line_waits_for_the_end_of_a_load_that_leaves_too_little_for_it() -> None:
    model, answers = LetterModel(EMBEDDER), list[BatchAnswer]()

    async def ask() -> None:
        answers.extend(await work.do([line(0)]))

    async with working(model, LINE_BYTES * 2) as (work, account), anyio.create_task_group() as tasks:
        account.resize(LINE_BYTES // 2, LINE_BYTES * 3 // 2)
        tasks.start_soon(ask)
        await until(lambda: account.waiting == 1 or bool(answers))
        assert not answers
        assert account.held_bytes == 0, "it holds up nobody"
        computed = len(model.forwarded)
        account.resize(LINE_BYTES * 2)
        account.serve()  # as the governor does at each look
        await until(lambda: bool(answers))
        assert body_of(answers[0])["status_code"] == 200
        assert computed <= TEXTS
        answers[0].give_back()


async def test_what_a_line_holds_is_known_until_it_is_written_and_given_back() -> None:
    async with working(LetterModel(EMBEDDER), 10**9) as (work, account):
        (answer,) = await work.do([line(0)])
        body = sum(map(len, answer.pieces()))
        assert body - 500 < account.held_bytes <= body
        answer.give_back()


async def test_a_line_that_is_dropped_while_it_waits_holds_nothing() -> None:
    gate = Gate()
    async with working(LetterModel(EMBEDDER, on_forward=gate), LINE_BYTES) as (work, account):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work.do, [line(0)])
            await gate.arrived()
            held = account.hold("another")
            held.add(LINE_BYTES)
            gate.open()
            await until(lambda: account.waiting == 1)
            tasks.cancel_scope.cancel()
        assert account.waiting == 0
        held.give_back()


async def test_a_job_gives_back_what_is_on_the_disk_and_its_lines_are_whole(tmp_path: Path) -> None:
    source, output = tmp_path / "lines.jsonl", tmp_path / "answers.jsonl"
    requests = [
        {"custom_id": f"r{number}", "url": "/pooling", "body": json.loads(line(number).body)} for number in range(12)
    ]
    await anyio.Path(source).write_text("\n".join(map(json.dumps, requests)))
    seen: list[Progress] = []
    async with working(LetterModel(EMBEDDER), LINE_BYTES * 2) as (work, _):

        def opening(stack: Any) -> Any:
            return open_batch(stack, source, output, None, identity={}, existing="reject")

        with anyio.fail_after(60):
            async with job_files(opening) as job:
                summary = await job.run(work, window=BATCH_WINDOW, report=seen.append)
    assert (summary.completed, summary.failed) == (12, 0)
    written: Sequence[Any] = [json.loads(each) for each in (await anyio.Path(output).read_bytes()).splitlines()]
    assert sorted(each["custom_id"] for each in written) == sorted(each["custom_id"] for each in requests)
    for each in written:
        data = each["response"]["body"]["data"]
        assert len(data) == TEXTS
        assert all(len(vectors["data"]) == len(TEXT) for vectors in data)


async def test_a_job_that_fails_to_write_holds_nothing(tmp_path: Path) -> None:
    source, output = tmp_path / "lines.jsonl", tmp_path / "answers.jsonl"
    request = {"custom_id": "r", "url": "/pooling", "body": json.loads(line(0).body)}
    await anyio.Path(source).write_text(json.dumps(request))
    async with working(LetterModel(EMBEDDER), 10**9) as (work, _):

        def opening(stack: Any) -> Any:
            job = open_batch(stack, source, output, None, identity={}, existing="reject")

            def full(answers: object) -> None:
                raise OSError(28, "No space left on device")

            job.writer.write = full  # type: ignore[method-assign]
            return job

        with pytest.raises(OSError, match="No space left"):
            async with job_files(opening) as job:
                await job.run(work, window=BATCH_WINDOW, report=lambda _: None)
