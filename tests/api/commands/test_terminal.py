"""Log lines on a terminal: the banner, one line for a request, and other events."""

from __future__ import annotations

import re
from typing import Any

import pytest
from structlog import DropEvent

from staged_pool.api.commands.terminal import TerminalRenderer

STAMP = "2026-11-28T20:15:30.5Z"


def shown(renderer: TerminalRenderer, **event: Any) -> str:
    return renderer(None, "info", {"level": "info", "timestamp": STAMP, **event})


@pytest.fixture
def plain() -> TerminalRenderer:
    return TerminalRenderer(colours=False)


def test_the_banner_has_the_model_the_address_and_a_request_to_try(plain: TerminalRenderer) -> None:
    first = shown(plain, event="server.listening", url="http://127.0.0.1:8000")
    banner = shown(plain, event="server.ready", model="small", width=384, dtype="bfloat16", device="cpu", load_s=2.06)
    assert "listening on http://127.0.0.1:8000" in first
    assert banner.splitlines()[0] == "staged-pool   small   384 numbers   bfloat16   cpu"
    assert "ready   http://127.0.0.1:8000   (loaded in 2.1 s)" in banner
    assert "curl -s http://127.0.0.1:8000/v1/embeddings" in banner


def test_a_model_without_vectors_leads_to_the_routes(plain: TerminalRenderer) -> None:
    shown(plain, event="server.listening", url="http://127.0.0.1:8000")
    banner = shown(plain, event="server.ready", model="ranker", width=0, dtype="float32", device="cpu", load_s=1.0)
    assert "numbers" not in banner
    assert "http://127.0.0.1:8000/docs" in banner


def test_a_request_is_one_short_line(plain: TerminalRenderer) -> None:
    fields = {"method": "POST", "path": "/v1/embeddings", "request_id": "abc", "parse_ms": 0.1}
    line = shown(plain, event="request.finished", status=200, items=2, tokens=1007, total_ms=38.76, **fields)
    assert re.fullmatch(r"\d\d:\d\d:30  200  POST /v1/embeddings +2 items +1,007 tokens  38\.8 ms", line)
    rejected = shown(plain, event="request.finished", status=429, error="too_large", total_ms=0.2, **fields)
    assert rejected.endswith("429  POST /v1/embeddings         too large  0.2 ms")
    many = shown(plain, event="request.finished", status=429, rejections_left_out=1500, total_ms=0.2, **fields)
    assert "and 1,500 more" in many


def test_other_events_name_their_fields_and_warnings_their_level(plain: TerminalRenderer) -> None:
    line = shown(plain, event="event_loop.late", level="warning", late_s=1.2, reason="a slow disk")
    assert line.endswith("warning  event_loop.late  late_s=1.2  reason='a slow disk'")
    failed = shown(plain, event="stage.worker_crashed", level="error", exception="Traceback: a bug")
    assert failed.endswith("error  stage.worker_crashed\nTraceback: a bug")
    assert "front-1  " in shown(plain, event="front.left", process="front-1")


def test_phases_of_a_load_are_told_at_their_end_and_a_download_at_both(plain: TerminalRenderer) -> None:
    begun = shown(plain, event="model.phase_began", model="org/m", phase="download")
    assert begun.endswith("downloading org/m")
    ended = {"event": "model.phase_ended", "model": "org/m", "seconds": 3.14}
    assert shown(plain, phase="download", bytes=87_000_000, **ended).endswith("downloaded org/m, 87.0 MB, in 3.1 s")
    assert shown(plain, phase="weights", **ended).endswith("read the weights of org/m in 3.1 s")
    assert shown(plain, phase="warm-up", **ended).endswith("warmed org/m up in 3.1 s")
    with pytest.raises(DropEvent):
        shown(plain, event="model.phase_began", model="org/m", phase="weights")


def test_the_long_line_about_the_model_is_left_out(plain: TerminalRenderer) -> None:
    with pytest.raises(DropEvent):
        shown(plain, event="model.understood", model="small")


def test_colours_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    event = {"event": "event_loop.late", "level": "warning"}
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[33m" in shown(TerminalRenderer(colours=True), **event)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in shown(TerminalRenderer(colours=True), **event)
