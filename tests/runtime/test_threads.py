"""Threads of our own, and how they stand back."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from staged_pool.runtime.threads import OwnThreads

pytestmark = pytest.mark.anyio


def priority(_: object = None) -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread has no priority of its own")
async def test_a_nice_thread_stands_back_and_no_other_does() -> None:
    before = priority()
    async with OwnThreads("nice", nice=3).running(2) as nice, OwnThreads("others").running() as others:
        assert await nice(priority, None) == min(19, before + 3)
        assert await others(priority, None) == before
    assert priority() == before


async def test_threads_can_come_later() -> None:
    async with OwnThreads("later").running(0) as threads:
        threads.grow(2)
        assert await threads(len, "abc") == 3
