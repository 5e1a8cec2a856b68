"""`staged-pool top`: its view of a real server, and its errors."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import anyio
import msgspec
import pytest
from rich.console import Console

from staged_pool.api.commands.top_view import rate, render, waiting_for
from staged_pool.api.live.durations import span
from staged_pool.api.live.feed import LiveEvent, LiveModel
from staged_pool.api.live.verdict import judge
from staged_pool.api.live.view import Moment, ReaderView, view_model
from tests.servers.engines import engine_on
from tests.servers.in_process import invoke_command
from tests.support.model import LetterModel

pytestmark = pytest.mark.anyio


async def an_event() -> LiveEvent:
    """Return the event of an engine that has answered something."""
    async with engine_on(LetterModel()) as engine:
        before = Moment(100.0, {"letters": engine.statistics()}, None)
        await engine.embed(["ab", "cde"])
        now = Moment(102.0, {"letters": engine.statistics()}, None)
    view = view_model(now, before, "letters")
    model = LiveModel(view=view, verdict=judge(view, None))
    readers = ReaderView(unread=0.5, requests=1, connections=3, late_s=0.25)
    return LiveEvent(at=102.0, period_s=0.25, state="", models={"letters": model}, readers=readers)


def printed(view: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=110, no_color=True).print(view)
    return out.getvalue()


async def test_the_view_has_the_verdict_the_stages_and_the_rates() -> None:
    text = printed(render(await an_event(), "http://here"))
    assert "staged-pool  http://here  serving" in text
    assert "> Calm" in text
    for stage in ("parse", "preprocess", "device", "postprocess"):
        assert stage in text
    assert "offered 0.5/s, admitted 0.5/s, rejected 0/s" in text
    assert "answers 0.5/s" in text
    assert "3 connections, 0.5 answers being read, the event loop is up to 250 ms late" in text


async def test_the_bottleneck_is_marked() -> None:
    event = await an_event()
    view = event.models["letters"].view
    stages = [replace(stage, busy=1.0, wait_s=2.0) if stage.name == "batch" else stage for stage in view.stages]
    hot = replace(view, stages=stages)
    marked = replace(event, models={"letters": LiveModel(view=hot, verdict=judge(hot, None))})
    text = printed(render(marked, "http://here"))
    assert "> The device is the bottleneck." in text
    assert "> device" in text
    assert "--dtype auto" in text


async def test_a_model_that_is_not_served_is_told_with_those_that_are() -> None:
    assert "The model other is not served. Served: letters." in printed(render(await an_event(), "u", "other"))
    assert "No answer from u: refused. Trying again." in printed(waiting_for("u", "refused"))


@pytest.mark.parametrize(("value", "text"), [(0.0, "0/s"), (1.26, "1.3/s"), (1234.5, "1,234/s")])
def test_rates(value: float, text: str) -> None:
    assert rate(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(2e-5, "20 us"), (0.0384, "38 ms"), (1.94, "1.9 s"), (75.0, "75 s")])
def test_durations(seconds: float, text: str) -> None:
    assert span(seconds) == text


@contextmanager
def answering(status: int, body: bytes = b"") -> Iterator[str]:
    """Run a server that answers each request alike."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("status", "body", "code", "words"),
    [
        (401, b"", 2, "pass --api-key"),
        (404, b"", 2, "has no /stages/live"),
        (500, b"", 1, "500"),
        (200, b'data: {"at": "x"}\n\n', 2, "has other events"),
        (200, b"", 1, "ended the stream"),
    ],
)
def test_an_answer_that_is_no_feed_ends_it_with_one_line(status: int, body: bytes, code: int, words: str) -> None:
    with answering(status, body) as address:
        ended = invoke_command("top", address, "--once")
    assert ended.returncode == code
    assert ended.stderr.startswith("error: ")
    assert words in ended.stderr


def test_a_server_that_is_not_there_is_told() -> None:
    ended = invoke_command("top", "127.0.0.1:9", "--once")
    assert ended.returncode == 1
    assert "does not answer" in ended.stderr


def test_a_wrong_address_is_told() -> None:
    ended = invoke_command("top", "http://127.0.0.1:port", "--once")
    assert ended.returncode == 2
    assert "such as 127.0.0.1:8000" in ended.stderr


def test_events_are_printed_once_the_rates_are_over_the_whole_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("staged_pool.api.commands.top.FIRST_RATES_S", 0.0)
    body = b"retry: 1000\n\ndata: %s\n\n" % msgspec.json.encode(anyio.run(an_event))
    with answering(200, body) as address:
        ended = invoke_command("top", address)
    assert ended.returncode == 0
    assert "answers 0.5/s" in ended.stdout
