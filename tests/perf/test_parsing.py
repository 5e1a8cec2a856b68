"""Servers that parse JSON elsewhere: they answer, and bodies have the stated size."""

from __future__ import annotations

import inspect
from contextlib import ExitStack

import pytest

from perf.cost.parsing import BODY_BYTES, INLINE_BYTES, requests, started
from perf.tools.servers import Options
from staged_pool.stages.parse import ParseStage


@pytest.mark.parametrize("size", BODY_BYTES)
def test_bodies_are_about_as_large_as_said_and_between_two_of_the_sizes(size: int) -> None:
    lengths = [len(request.partition(b"\r\n\r\n")[2]) for request in requests(size)]
    assert all(length == pytest.approx(size, rel=0.05) for length in lengths)
    assert sum(inline < min(lengths) for inline in INLINE_BYTES) == BODY_BYTES.index(size) + 1
    assert sum(inline < max(lengths) for inline in INLINE_BYTES) == BODY_BYTES.index(size) + 1


def test_the_default_is_among_the_sizes() -> None:
    assert inspect.signature(ParseStage).parameters["inline_bytes"].default == INLINE_BYTES[1]


@pytest.mark.long
def test_a_server_with_another_size_answers() -> None:
    with ExitStack() as running:
        server = started(running, Options(), INLINE_BYTES[0])
        assert server.wait_answer(requests(BODY_BYTES[0])[0]).status == 200
