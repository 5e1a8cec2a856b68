"""Lines that a running server answers: the same output as of the engine, and its overload is waited for."""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import pytest

from staged_pool.api.bulk.batch_lines import BatchAnswers, BatchLine
from staged_pool.api.bulk.server_work import BulkClient, ServerWork
from staged_pool.client.errors import ConnectionFailed
from staged_pool.client.retry import RetryPolicy
from staged_pool.runtime.config import EngineConfig
from tests.api.bulk.jobs import read_lines, request, run, write_lines
from tests.servers.on_socket import serving
from tests.support.gates import Gate
from tests.support.model import LetterModel, expected

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("servers_may_import")]


async def test_a_server_answers_the_lines(tmp_path: Path) -> None:
    lines = [request(str(number), f"text {number}") for number in range(50)]
    lines += [request("model", model="none"), request("bytes", encoding_format="bytes"), request("url", url="/nowhere")]
    await write_lines(tmp_path / "in.jsonl", [*lines, "not json"])
    async with serving() as served, BulkClient(served.url) as client:
        summary = await run(tmp_path, ServerWork(client, BatchAnswers("job")))
    assert (summary.completed, summary.failed) == (50, 4)
    answers = {answer["custom_id"]: answer for answer in await read_lines(tmp_path / "out.jsonl")}
    vector = answers["7"]["response"]["body"]["data"][0]["embedding"]
    assert vector == expected("text 7").tolist()
    assert answers["model"]["response"]["status_code"] == 404
    assert answers["url"]["response"]["status_code"] == 404
    assert answers["bytes"]["error"]["code"] == "answer_not_json"
    assert answers[None]["error"]["code"] == "invalid_json_line"


async def test_overload_of_a_server_is_waited_for(tmp_path: Path) -> None:
    gate = Gate()
    await write_lines(tmp_path / "in.jsonl", [request(str(number)) for number in range(3)])
    async with serving(LetterModel(on_forward=gate), engine=EngineConfig(max_requests=1)) as served:
        async with BulkClient(served.url, retry=RetryPolicy(retries=0)) as client, anyio.create_task_group() as tasks:

            async def open_after_rejections() -> None:
                await gate.arrived()
                while sum(served.engine.statistics().admission.refused.values()) < 2:
                    await anyio.lowlevel.checkpoint()
                gate.open()

            tasks.start_soon(open_after_rejections)
            summary = await run(tmp_path, ServerWork(client, BatchAnswers("job")))
    assert (summary.completed, summary.failed) == (3, 0)


async def test_a_server_that_is_not_there_ends_the_run_which_can_go_on(tmp_path: Path, free_tcp_port: int) -> None:
    await write_lines(tmp_path / "in.jsonl", [request("1")])
    client = BulkClient(f"http://127.0.0.1:{free_tcp_port}", retry=RetryPolicy(retries=0))
    async with client:
        with pytest.raises(ConnectionFailed):
            await run(tmp_path, ServerWork(client, BatchAnswers("job")))
    async with serving() as served, BulkClient(served.url) as client:
        summary = await run(tmp_path, ServerWork(client, BatchAnswers("job")), existing="resume")
    assert summary.completed == 1


async def test_lines_have_bulk_priority() -> None:
    gate = Gate()
    async with serving(LetterModel(on_forward=gate)) as served, BulkClient(served.url) as client:
        work = ServerWork(client, BatchAnswers("job"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work.do, [_line()])
            await gate.arrived()
            assert served.engine.statistics().priorities["bulk"].requests == 1
            gate.open()


def _line() -> BatchLine:
    return BatchLine(0, "1", "/v1/embeddings", json.dumps({"input": "a"}).encode())
