"""Traces: what gets into them, and that nothing else does."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from staged_pool.api.bench.access_log import LogReader
from staged_pool.api.bench.replay import TraceMaker
from staged_pool.api.bench.sizes import Kind
from staged_pool.api.bench.texts import TokenRate
from staged_pool.api.bench.trace import KIND_OF_ROUTE, Row, Trace, read_trace
from staged_pool.api.bench.workload import Target
from staged_pool.stages.errors import ConfigError
from tests.servers.in_memory import serving_in_memory
from tests.support.cards import BOTH_LANES
from tests.support.model import LetterModel

START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def finished(at_s: float, total_ms: float = 0.0, **fields: Any) -> bytes:
    """A line of the log, of a request that ended `at_s` seconds from a start."""
    stamp = datetime.fromtimestamp(START.timestamp() + at_s, UTC).isoformat().replace("+00:00", "Z")
    whole = {
        "method": "POST", "path": "/v1/embeddings", "status": 200, "path_taken": "fast", "body_bytes": 300,
        "model": "secret-model", "tenant": "secret-tenant", "client": "10.9.8.7", "items": 2, "tokens": 9,
        "total_ms": total_ms, "request_id": "secret-id", "trace_id": "secret-trace", "event": "request.finished",
        "level": "info", "timestamp": stamp,
    }  # fmt: skip
    return json.dumps({**whole, **fields}).encode() + b"\n"


def test_a_log_becomes_arrival_times_and_sizes_in_order() -> None:
    reader = LogReader()
    reader.read([
        b'{"event": "server.ready", "level": "info"}\n',
        finished(2.0, 1500, items=1, tokens=5, priority="bulk"),
        finished(1.0, 250, path="/v1/rerank", items=3, tokens=60, body_bytes=900),
        finished(5.0, 1000, images=1, items=1, tokens=50, body_bytes=70_000),
    ])  # fmt: skip
    rows = reader.trace().rows
    assert [round(row.at_s, 6) for row in rows] == [0.0, 0.25, 3.5]
    assert [(row.route, row.items, row.tokens, row.images, row.body_bytes, row.bulk) for row in rows] == [
        ("/v1/embeddings", 1, 5, 0, 300, True),
        ("/v1/rerank", 3, 60, 0, 900, False),
        ("/v1/embeddings", 1, 50, 1, 70_000, False),
    ]
    assert [row.kind for row in rows] == ["texts", "rerank", "images"]
    assert reader.trace(2).rows == rows[:2]


def test_a_trace_holds_sizes_only() -> None:
    reader = LogReader()
    reader.read([finished(0.0), finished(1.0, path="/secret/path"), finished(2.0, path="/m/secret/v1/embeddings")])
    content = b"".join(reader.trace().lines()).decode()
    assert "secret" not in content
    assert "10.9.8.7" not in content
    assert [set(json.loads(line)) for line in content.splitlines()] == [
        {"format", "version", "requests"},
        {"at_s", "route", "items", "tokens", "images", "body_bytes", "priority"},
    ]
    assert reader.others == 2


def test_lines_without_sizes_are_counted() -> None:
    reader = LogReader()
    no_items = {"items": 0, "tokens": 0}
    reader.read([
        finished(0.0),
        finished(0.1, status=429, rejections_left_out=6, **no_items),
        finished(0.2, status=429, **no_items),
        finished(0.3, status=400, **no_items),
        finished(0.4, path="/health", method="GET"),
        b"12:00 [info] request.finished status=200\n",
        finished(0.5)[:-20],
        finished(0.6, timestamp="yesterday"),
        finished(0.7, items="many"),
        b'["request.finished"]\n',
    ])  # fmt: skip
    assert (len(reader.rows), reader.rejected, reader.failed, reader.others, reader.unreadable) == (1, 8, 1, 1, 5)
    assert reader.summary() == (
        "1 requests over 0.0 s; 8 rejected ones have no sizes and are left out; 1 failed ones have no sizes and are "
        "left out; 1 to other routes are left out; 5 lines could not be read"
    )


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    rows = [Row(at_s=i / 7, route=route, items=i + 1, tokens=i * 3, images=i % 2, body_bytes=i, bulk=i % 3 == 0)
            for i, route in enumerate(KIND_OF_ROUTE)]  # fmt: skip
    trace = Trace.of(rows)
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"".join(trace.lines()))
    read = read_trace(path)
    assert [row.at_s for row in read.rows] == pytest.approx([row.at_s for row in rows], abs=1e-6)
    assert [(row.route, row.items, row.tokens, row.images, row.body_bytes, row.bulk) for row in read.rows] == [
        (row.route, row.items, row.tokens, row.images, row.body_bytes, row.bulk) for row in rows
    ]
    faster = read.replayed(2.0, 4)
    assert [row.at_s for row in faster.rows] == pytest.approx([0, 1 / 14, 2 / 14, 3 / 14], abs=1e-6)
    assert faster.seconds == faster.rows[-1].at_s


HEAD = b'{"format":"staged-pool-trace","version":1,"requests":1}\n'
LINE = b'{"at_s":0,"route":"/embed","items":1,"tokens":1,"images":0,"body_bytes":1,"priority":"interactive"}\n'


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        (b"", "is no trace"),
        (LINE, "is no trace"),
        (b"\xff\xff", "is no trace"),
        (HEAD.replace(b'"version":1', b'"version":2'), "has version 2 of the format"),
        (HEAD, "has no requests"),
        (HEAD + LINE + b"{", "line 3 is no request"),
        (HEAD + LINE.replace(b'"items":1', b'"items":0'), "line 2"),
        (HEAD + LINE.replace(b'"items":1', b'"items":9999999'), "line 2"),
        (HEAD + LINE.replace(b"/embed", b"/admin/models"), "line 2"),
        (HEAD + LINE.replace(b'"at_s":0', b'"at_s":-1'), "line 2"),
        (HEAD + LINE.replace(b'"at_s":0', b'"at_s":NaN'), "line 2"),
    ],
)
def test_a_wrong_trace_is_told_with_its_line(content: bytes | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        read_trace(path)


def maker(*rows: Row) -> TraceMaker:
    rates: dict[Kind, TokenRate] = {"texts": TokenRate(1.0, 2.0), "rerank": TokenRate(1.0, 13.0)}
    return TraceMaker(Trace.of(rows), Target(authority="a"), rates, np.random.default_rng(1))


def row(route: str, items: int, tokens: int, images: int = 0, body_bytes: int = 100, *, bulk: bool = False) -> Row:
    return Row(at_s=0, route=route, items=items, tokens=tokens, images=images, body_bytes=body_bytes, bulk=bulk)


def test_replayed_texts_have_the_tokens_of_the_trace() -> None:
    make = maker(row("/v2/embed", 3, 100), row("/classify", 1, 12, bulk=True))
    first, second, again = make(), make(), make()
    assert (first.items, second.items, again.items) == (3, 1, 3)
    texts = json.loads(first.content.partition(b"\r\n\r\n")[2])["input"]
    assert [len(text.split()) for text in texts] == [32, 31, 31]
    assert first.content.startswith(b"POST /v1/embeddings ")
    assert b"X-Priority" not in first.content
    assert b"\r\nX-Priority: bulk\r\n" in second.content
    assert first.content != again.content


def test_replayed_rankings_have_their_documents() -> None:
    made = maker(row("/score", 4, 4 * 40))()
    body = json.loads(made.content.partition(b"\r\n\r\n")[2])
    assert made.content.startswith(b"POST /v1/rerank ")
    assert [len(text.split()) for text in body["documents"]] == [27] * 4


def test_replayed_images_have_about_the_bytes_of_the_trace() -> None:
    make = maker(row("/v2/embed", 1, 50, images=1, body_bytes=60_000), row("/pooling", 3, 90, 2, 60_000))
    make.draw_images()
    one, mixed = make(), make()
    assert len(one.content) == pytest.approx(60_000, rel=0.4)
    assert "messages" in json.loads(one.content.partition(b"\r\n\r\n")[2])
    inputs = json.loads(mixed.content.partition(b"\r\n\r\n")[2])["input"]
    assert [list(each) for each in inputs] == [["image"], ["image"], ["text"]]
    assert len(mixed.content) == pytest.approx(60_000, rel=0.4)


@pytest.mark.anyio
@pytest.mark.filterwarnings("ignore:Async generator 'httpx:ResourceWarning")  # the client's own, on trio
async def test_the_log_of_a_server_has_what_a_trace_needs(logged: list[dict[str, Any]]) -> None:
    model = LetterModel(BOTH_LANES, read_image=lambda data: "image")
    async with serving_in_memory(model) as served, served.client() as client:
        await client.post("/v1/embeddings", json={"input": ["ab", "cde"]})
        await client.post("/v2/embed", json={"texts": ["abc"]}, headers={"X-Priority": "bulk"})
        image = {"image": "data:image/jpeg;base64,AAAA"}
        await client.post("/v1/embeddings", json={"input": [image, {"text": "abcd"}]})
        await client.get("/stages")
    lines = [
        json.dumps({**event, "timestamp": f"2026-01-02T03:04:0{second}Z"}).encode()
        for second, event in enumerate(event for event in logged if event["event"] == "request.finished")
    ]
    reader = LogReader()
    reader.read(lines)
    assert [(row.route, row.items, row.tokens, row.images, row.bulk) for row in reader.trace().rows] == [
        ("/v1/embeddings", 2, 5, 0, False),
        ("/v2/embed", 1, 3, 0, True),
        ("/v1/embeddings", 2, 9, 1, False),
    ]
    assert [row.body_bytes > 10 for row in reader.rows] == [True] * 3
    assert (reader.others, reader.unreadable) == (1, 0)
