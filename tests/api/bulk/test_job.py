"""A job answers each line once, whatever ends its runs; and a wrong line fails alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import anyio
import pytest
from anyio.streams.memory import MemoryObjectSendStream

from staged_pool.api.bulk import job as job_module
from staged_pool.api.bulk.batch_lines import BatchAnswer, BatchLine
from staged_pool.api.bulk.job import Window
from staged_pool.api.bulk.journal import Journal
from staged_pool.api.bulk.opening import Existing
from staged_pool.stages.errors import ConfigError, EngineStopped
from tests.api.bulk.jobs import EchoWork, Reports, line_of, names, read_lines, request, run, write_lines
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


async def test_each_line_has_one_answer_and_the_files_of_the_run_are_gone(tmp_path: Path) -> None:
    await write_lines(tmp_path / "in.jsonl", [request(str(number), f"text {number}") for number in range(500)])
    reports = Reports()
    summary = await run(tmp_path, EchoWork(), report=reports)
    answers = await read_lines(tmp_path / "out.jsonl")
    assert {answer["custom_id"]: answer["response"]["body"]["input"] for answer in answers} == {
        str(number): f"text {number}" for number in range(500)
    }
    assert len(answers) == 500
    assert (summary.completed, summary.failed, summary.resumed, summary.finished) == (500, 0, 0, True)
    assert await names(tmp_path) == ["in.jsonl", "out.jsonl"]
    assert (reports[-1].completed, reports[-1].share) == (500, 1.0)


@pytest.mark.parametrize("errors", [False, True])
async def test_a_wrong_line_fails_alone_and_says_why(tmp_path: Path, errors: bool) -> None:
    wrong = {
        "not json": "{",
        "no object": "[1]",
        "no id": {"method": "POST", "url": "/v1/embeddings", "body": {}},
        "no text as id": {**request("1"), "custom_id": 1},
        "method": {**request("method"), "method": "GET"},
        "url": {**request("url"), "url": "v1/embeddings"},
        "body": {**request("body"), "body": [1]},
        "not UTF-8": b'{"custom_id": "\xff"}',
    }
    codes = [
        "invalid_json_line", "invalid_json_line", "missing_custom_id", "missing_custom_id", "invalid_method",
        "invalid_url", "invalid_body", "invalid_json_line",
    ]  # fmt: skip
    await write_lines(tmp_path / "in.jsonl", [request("first"), "", *wrong.values(), "  ", request("last")])
    summary = await run(tmp_path, EchoWork(), errors=errors)
    assert (summary.completed, summary.failed) == (2, len(wrong))
    answers = await read_lines(tmp_path / "out.jsonl")
    failed = (
        await read_lines(tmp_path / "errors.jsonl") if errors else [answer for answer in answers if answer["error"]]
    )
    assert {answer["custom_id"] for answer in answers if answer not in failed} == {"first", "last"}
    failed.sort(key=lambda answer: int(answer["error"]["line"]))
    assert [answer["error"]["code"] for answer in failed] == codes
    assert [answer["error"]["line"] for answer in failed] == list(range(3, 3 + len(wrong)))
    assert all(answer["response"] is None for answer in failed)


async def test_a_line_with_a_wrong_text_keeps_its_custom_id_and_says_what_is_wrong(tmp_path: Path) -> None:
    half, bytes_ = "a text in it holds half of a surrogate pair", "it is not UTF-8, from byte {} of line {} on"
    wrong: list[tuple[bytes, str | None, str]] = [
        (rb'{"custom_id": "a", "url": "/v1/embeddings", "body": {"input": "\ud83d"}}', "a", half),
        (rb'{"body": {"input": "\ud83d\n"}, "custom_id": "b", "url": "/v1/embeddings"}', "b", half),
        (rb'{"custom_id": "c", "url": "/v1/embeddings", "body": {"input": "\udc00"}}', "c", half),
        (rb'{"custom_id": "d", "url": "\ud83dx", "body": {}}', "d", half),
        (rb'{"custom_id": "\ud83d", "url": "/v1/embeddings", "body": {}}', None, half),
        (b'{"custom_id": "e", "url": "/v1/embeddings", "body": {"input": "\xff"}}', "e", bytes_.format(64, 7)),
        (b'{"custom_id": "\xff", "url": "/v1/embeddings", "body": {}}', None, bytes_.format(16, 8)),
        (b'{"custom_id": "f", "url": "\xff", "body": {}}', "f", bytes_.format(28, 9)),
        (b'{"custom_id": "a", "url": "/v1/embeddings", "body": {}}', "a", "has the same one"),
    ]
    lines = [b"\xef\xbb\xbf" + line_of(request("first")), *(line for line, _, _ in wrong), line_of(request("last"))]
    await anyio.Path(tmp_path / "in.jsonl").write_bytes(b"\r\n".join(lines))
    summary = await run(tmp_path, EchoWork(), errors=True)
    assert (summary.completed, summary.failed) == (2, len(wrong))
    failed = sorted(await read_lines(tmp_path / "errors.jsonl"), key=lambda answer: int(answer["error"]["line"]))
    assert [answer["custom_id"] for answer in failed] == [custom_id for _, custom_id, _ in wrong]
    assert not [why for answer, (_, _, why) in zip(failed, wrong, strict=True) if why not in answer["error"]["message"]]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
async def test_an_input_of_another_encoding_is_named_and_leaves_nothing(tmp_path: Path, encoding: str) -> None:
    text = json.dumps(request("a")) + "\n"
    await anyio.Path(tmp_path / "in.jsonl").write_bytes(text.encode(encoding))
    with pytest.raises(ConfigError, match="the input cannot be read: it is UTF-16, but must be UTF-8"):
        await run(tmp_path, EchoWork())
    assert await names(tmp_path) == ["in.jsonl"]


async def test_a_repeated_custom_id_fails_alone_and_the_first_one_is_answered(tmp_path: Path) -> None:
    lines = [request("a", "one"), request("b"), request("a", "two"), {**request("c"), "method": "GET"}, request("c")]
    await write_lines(tmp_path / "in.jsonl", [*lines, "", request("a", "three")])
    summary = await run(tmp_path, EchoWork(), errors=True)
    assert (summary.completed, summary.failed) == (2, 4)
    answers = {each["custom_id"]: each for each in await read_lines(tmp_path / "out.jsonl")}
    assert answers.keys() == {"a", "b"}
    assert answers["a"]["response"]["body"]["input"] == "one"
    failed = {each["error"].pop("line"): each for each in await read_lines(tmp_path / "errors.jsonl")}
    found = {line: (each["custom_id"], each["error"]["code"]) for line, each in failed.items()}
    repeated = "duplicate_custom_id"
    assert found == {3: ("a", repeated), 4: ("c", "invalid_method"), 5: ("c", repeated), 7: ("a", repeated)}
    assert failed[7]["error"]["message"] == "custom_id: line 1 has the same one; name each request differently"


async def test_a_resumed_job_knows_the_custom_ids_of_its_earlier_run(tmp_path: Path) -> None:
    numbers = [*range(20), *range(20)]
    await write_lines(tmp_path / "in.jsonl", [request(str(n), f"text {place}") for place, n in enumerate(numbers)])

    async def before(line: BatchLine) -> None:
        if line.number == 25:
            raise EngineStopped("the engine is broken")

    with pytest.raises(EngineStopped, match="is broken"):
        await run(tmp_path, EchoWork(before), window=Window(lines=1))
    summary = await run(tmp_path, EchoWork(), existing="resume")
    assert (summary.resumed, summary.completed, summary.failed) == (25, 20, 20)
    answers = await read_lines(tmp_path / "out.jsonl")
    right = {each["custom_id"]: each["response"]["body"]["input"] for each in answers if each["error"] is None}
    assert right == {str(number): f"text {number}" for number in range(20)}
    assert {each["error"]["code"] for each in answers if each["error"] is not None} == {"duplicate_custom_id"}


async def test_without_failures_no_file_of_errors_is_left(tmp_path: Path) -> None:
    await write_lines(tmp_path / "in.jsonl", [request("1")])
    await anyio.Path(tmp_path / "errors.jsonl").write_text("of an older run")
    await run(tmp_path, EchoWork(), errors=True)
    assert await names(tmp_path) == ["in.jsonl", "out.jsonl"]


async def test_an_empty_input_gives_an_empty_output(tmp_path: Path) -> None:
    await write_lines(tmp_path / "in.jsonl", [])
    summary = await run(tmp_path, EchoWork())
    assert (summary.completed, summary.finished) == (0, True)
    assert await anyio.Path(tmp_path / "out.jsonl").read_bytes() == b""


@pytest.mark.parametrize("end", ["cancel", "error", "stop"])
async def test_a_run_that_ends_early_keeps_its_answers_and_the_next_one_does_the_rest(tmp_path: Path, end: str) -> None:
    await write_lines(tmp_path / "in.jsonl", [request(str(number)) for number in range(100)])
    stop, scope, held = anyio.Event(), anyio.CancelScope(), anyio.Event()

    async def before(line: BatchLine) -> None:
        if line.number < 10:
            return
        held.set()
        if end == "error":
            raise EngineStopped("the engine is broken")
        if end == "cancel":
            await anyio.sleep_forever()

    saved = anyio.Event()

    def report(progress: object) -> None:
        saved.set()
        if end == "stop":
            stop.set()

    async def end_it() -> None:
        await saved.wait()
        await held.wait()
        scope.cancel()

    first = EchoWork(before)
    window = Window(lines=10)
    with scope:
        if end == "error":
            with pytest.raises(EngineStopped, match="is broken"):
                await run(tmp_path, first, window=window)
        elif end == "stop":
            summary = await run(tmp_path, first, window=window, report=report, stop=stop)
            assert not summary.finished
            assert summary.completed < 100
        else:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(end_it)
                await run(tmp_path, first, window=window, report=report)
    assert not await anyio.Path(tmp_path / "out.jsonl").exists()
    second = EchoWork()
    summary = await run(tmp_path, second, existing="resume")
    assert summary.resumed == 100 - len(second.asked)
    assert summary.resumed > 0
    answers = await read_lines(tmp_path / "out.jsonl")
    assert sorted(int(answer["custom_id"]) for answer in answers) == list(range(100))


@contextmanager
def reading_ahead() -> Iterator[Callable[[], bool]]:
    """Yield what tells whether the reader of a job waits until somebody takes its lines."""
    sends: list[MemoryObjectSendStream[Any]] = []
    original = job_module._Run._read

    async def read(self: job_module._Run[Any, Any], send: MemoryObjectSendStream[Any]) -> None:
        sends.append(send)
        await original(self, send)

    with patch.object(job_module._Run, "_read", read):
        yield lambda: any(send.statistics().tasks_waiting_send for send in sends)


@pytest.mark.parametrize("anyio_backend", ["asyncio", ("asyncio", {"use_uvloop": True})])
async def test_a_run_that_its_host_cancels_is_cancelled_although_lines_are_read_ahead(tmp_path: Path) -> None:
    """Asyncio cancels one task alone. It takes no more lines, and only then ends its reader."""
    await write_lines(tmp_path / "in.jsonl", [request(str(number), "x" * 100_000) for number in range(100)])

    async def before(line: BatchLine) -> None:
        await anyio.sleep_forever()

    with reading_ahead() as reader_waits:
        running = asyncio.create_task(run(tmp_path, EchoWork(before), window=Window(lines=1)))
        await until(reader_waits)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


async def test_an_error_of_a_job_is_told_alone_although_lines_are_read_ahead(tmp_path: Path) -> None:
    await write_lines(tmp_path / "in.jsonl", [request(str(number), "x" * 100_000) for number in range(100)])
    with reading_ahead() as reader_waits:

        async def take(*_: object) -> None:
            await until(reader_waits)
            raise RuntimeError("a bug")

        with patch.object(job_module._Room, "take", take), pytest.raises(RuntimeError, match="a bug"):
            await run(tmp_path, EchoWork())


async def test_what_was_written_after_the_last_checkpoint_is_done_again(tmp_path: Path) -> None:
    """The disk after a power cut: the part has more than the journal says, and the journal ends torn."""
    await write_lines(tmp_path / "in.jsonl", [request(str(number)) for number in range(20)])
    stop = anyio.Event()

    async def before(line: BatchLine) -> None:
        if line.number == 9:
            stop.set()

    await run(tmp_path, EchoWork(before), window=Window(lines=5), stop=stop)
    for name, tail in (("part", b'{"id": "half an ans'), ("journal", b'0123abcd {"done": [[')):
        async with await anyio.open_file(tmp_path / f"out.jsonl.{name}", "ab") as file:
            await file.write(tail)
    await run(tmp_path, EchoWork(), existing="resume")
    assert sorted(int(answer["custom_id"]) for answer in await read_lines(tmp_path / "out.jsonl")) == list(range(20))


async def test_an_end_between_the_names_of_the_files_is_made_up_for(tmp_path: Path) -> None:
    await write_lines(tmp_path / "in.jsonl", [request("1"), "wrong"])
    with patch.object(Journal, "remove", side_effect=KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            await run(tmp_path, EchoWork(), errors=True)
    answers = await anyio.Path(tmp_path / "out.jsonl").read_bytes()
    second = EchoWork()
    summary = await run(tmp_path, second, errors=True, existing="resume")
    assert (summary.completed, summary.failed, summary.finished, second.asked) == (1, 1, True, [])
    assert await anyio.Path(tmp_path / "out.jsonl").read_bytes() == answers
    assert len(await read_lines(tmp_path / "errors.jsonl")) == 1
    assert not await anyio.Path(tmp_path / "out.jsonl.journal").exists()


async def test_the_window_bounds_what_is_worked_on(tmp_path: Path) -> None:
    await write_lines(tmp_path / "in.jsonl", [request(str(number)) for number in range(60)])
    working, most = 0, 0

    async def before(line: BatchLine) -> None:
        nonlocal working, most
        working += 1
        most = max(most, working)
        await anyio.lowlevel.checkpoint()
        working -= 1

    await run(tmp_path, EchoWork(before), window=Window(lines=7))
    assert most == 7


async def test_a_line_that_is_larger_than_the_window_is_worked_on_alone(tmp_path: Path) -> None:
    texts = ["small", "large " * 1000, "small", "large " * 1000]
    await write_lines(tmp_path / "in.jsonl", [request(str(number), text) for number, text in enumerate(texts)])
    summary = await run(tmp_path, EchoWork(), window=Window(size=2000))
    assert summary.completed == 4


async def test_lines_are_given_to_the_work_in_groups(tmp_path: Path) -> None:
    await write_lines(tmp_path / "in.jsonl", [request(str(number)) for number in range(10)])
    sizes: list[int] = []

    class Grouped(EchoWork):
        async def do(self, lines: Sequence[BatchLine]) -> Sequence[BatchAnswer]:
            sizes.append(len(lines))
            return await super().do(lines)

    await run(tmp_path, Grouped(), window=Window(group_lines=4))
    assert sorted(sizes) == [2, 4, 4]


async def test_a_failing_disk_ends_the_run_and_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    await write_lines(tmp_path / "in.jsonl", [request("1")])
    with patch("staged_pool.api.bulk.lines_writer.write_all", side_effect=OSError(28, "No space left on device")):
        with pytest.raises(OSError, match="No space left"):
            await run(tmp_path, EchoWork())
    summary = await run(tmp_path, EchoWork(), existing="resume")
    assert (summary.completed, summary.resumed) == (1, 0)


async def test_a_part_that_was_changed_is_an_error(tmp_path: Path) -> None:
    await write_lines(tmp_path / "in.jsonl", [request(str(number)) for number in range(5)])
    with patch.object(job_module, "finish", side_effect=KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            await run(tmp_path, EchoWork())
    await anyio.Path(tmp_path / "out.jsonl.part").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"out\.jsonl\.part: it has 0 bytes, and its journal says \d+"):
        await run(tmp_path, EchoWork(), existing="resume")


async def test_a_changed_input_is_an_error(tmp_path: Path) -> None:
    await write_lines(tmp_path / "in.jsonl", [request("1"), request("2")])
    stop = anyio.Event()

    async def before(line: BatchLine) -> None:
        stop.set()

    await run(tmp_path, EchoWork(before), window=Window(lines=1), stop=stop, model="a")
    with pytest.raises(ConfigError, match="another job: model was 'a' and is 'b'"):
        await run(tmp_path, EchoWork(), existing="resume", model="b")
    await write_lines(tmp_path / "in.jsonl", [request("1")])
    with pytest.raises(ConfigError, match="another job: input_bytes was"):
        await run(tmp_path, EchoWork(), existing="resume", model="a")
    summary = await run(tmp_path, EchoWork(), existing="overwrite", model="b")
    assert summary.completed == 1


async def test_a_run_that_has_done_nothing_leaves_nothing(tmp_path: Path) -> None:
    await write_lines(tmp_path / "in.jsonl", [request("1")])
    stop = anyio.Event()
    stop.set()
    summary = await run(tmp_path, EchoWork(), errors=True, stop=stop)
    assert (summary.completed, summary.finished) == (0, False)
    assert await names(tmp_path) == ["in.jsonl"]


async def test_an_output_that_exists_is_an_error(tmp_path: Path) -> None:
    await write_lines(tmp_path / "in.jsonl", [request("1")])
    await anyio.Path(tmp_path / "out.jsonl").write_text("precious")
    existing: Existing
    for existing in ("reject", "resume"):
        with pytest.raises(ConfigError, match="the file exists; name another one, or overwrite it"):
            await run(tmp_path, EchoWork(), existing=existing)
    await run(tmp_path, EchoWork(), existing="overwrite")
    assert json.loads(await anyio.Path(tmp_path / "out.jsonl").read_text())["custom_id"] == "1"


async def test_files_that_cannot_be_used_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the input cannot be read: No such file"):
        await run(tmp_path, EchoWork())
    await anyio.Path(tmp_path / "in.jsonl").mkdir()
    with pytest.raises(ConfigError, match="expected a file, which a resumed job can read again"):
        await run(tmp_path, EchoWork())
    assert not await anyio.Path(tmp_path / "out.jsonl").exists()
