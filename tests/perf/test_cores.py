"""The owners of a server's thread time."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from anyio import to_thread

from perf.cost.cores import threads_of
from perf.tools.servers import ROOT
from staged_pool.runtime.threads.dedicated_threads import DedicatedThreads

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="no other system says it")


def work(seconds: float) -> None:
    """Until this thread has had a core for so long."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


async def measure() -> None:
    before, _ = await to_thread.run_sync(threads_of, os.getpid())
    async with (
        DedicatedThreads("staged-pool image device").running(2) as device,
        DedicatedThreads("staged-pool image preprocess").running() as preprocess,
        DedicatedThreads("staged-pool offload").running() as offload,
    ):
        await device.run_on_each(work, 0.04)
        await preprocess(work, 0.03)
        await offload(work, 0.02)
        after, _ = await to_thread.run_sync(threads_of, os.getpid())
    took = {whose: after[whose] - before.get(whose, 0.0) for whose in after}
    assert took["device"] >= 0.08
    assert 0.03 <= took["preprocess"] < 0.08
    assert took["other threads"] >= 0.02


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_time_of_threads_is_told_apart_by_their_names(backend: str) -> None:
    """Run in a process without other tests' threads, which may end at any time."""
    code = f"import anyio; from tests.perf.test_cores import measure; anyio.run(measure, backend={backend!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=True)
