"""Pools of worker processes: their jobs, their crashes and their end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import structlog

from staged_pool.runtime.workers.jobs import JobFailed, WorkerDied
from staged_pool.runtime.workers.pipe import MEMORY_BYTES
from staged_pool.runtime.workers.pool import WorkerPool
from staged_pool.stages.errors import ConfigError, EngineStopped, TooLarge, UnusableMedia
from tests.support.worker_processes import processes, replaced


@dataclass(frozen=True)
class Odd:
    """Work whose jobs say what happens."""

    start: str = ""
    text: str = ""

    def open(self) -> Callable[[Any], Any]:
        if self.start == "raise":
            raise RuntimeError("no luck")
        if self.start == "die":
            os._exit(7)
        return self.do

    def do(self, job: Any) -> Any:
        kind, value = job
        match kind:
            case "double":
                return value * 2
            case "pid":
                return os.getpid()
            case "raise":
                raise value
            case "exit":
                raise SystemExit("a secret")
            case "die":
                os.kill(os.getpid(), value)
            case "touch":
                Path(value).touch()
                time.sleep(600)
            case "unpicklable":
                return threading.Lock()


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with closing(WorkerPool("odd", Odd(), 2)) as opened:
        yield opened


@pytest.mark.parametrize(
    "shape", [(0,), (3, 5), (300, 400), (MEMORY_BYTES // 4 + 1,)], ids=["none", "small", "in memory", "too large"]
)
def test_arrays_come_back_as_they_are(pool: WorkerPool, shape: tuple[int, ...]) -> None:
    given = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    found = pool.call(("double", given))
    assert found.dtype == given.dtype
    assert np.array_equal(found, given * 2)


def test_results_outlive_the_next_job(pool: WorkerPool) -> None:
    given = [np.full((512, 512), number, np.float32) for number in range(6)]
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda values: pool.call(("double", values)), given))
    for number, values in enumerate(found):
        assert (values == 2 * number).all()
        values[:] = 0  # nobody else sees it


def test_several_arrays_and_strided_ones(pool: WorkerPool) -> None:
    given: list[Any] = [np.arange(120_000).reshape(300, 400)[:, ::2], "text", np.ones(7, np.uint8), b"bytes"]
    first, text, third, raw = pool.call(("double", given))[4:]
    assert np.array_equal(first, given[0])
    assert (text, raw) == ("text", b"bytes")
    assert third.tolist() == [1] * 7


def test_errors_for_the_caller_are_whole(pool: WorkerPool) -> None:
    with pytest.raises(TooLarge, match="too much") as caught:
        pool.call(("raise", TooLarge("too much", param="input", index=3)))
    assert (caught.value.param, caught.value.index) == ("input", 3)
    with pytest.raises(UnusableMedia):
        pool.call(("raise", UnusableMedia("broken")))


@pytest.mark.parametrize("job", [("raise", RuntimeError("a secret")), ("exit", None)])
def test_other_errors_are_logged_and_their_process_lives(
    pool: WorkerPool, job: Any, logged: list[structlog.typing.EventDict]
) -> None:
    before = processes()
    with pytest.raises(JobFailed) as caught:
        pool.call(job)
    assert "secret" not in str(caught.value)
    assert "a secret" in next(event["error"] for event in logged if event["event"] == "workers.job_failed")
    assert processes() == before


def test_a_process_that_dies_fails_its_job_alone_and_is_replaced(
    pool: WorkerPool, logged: list[structlog.typing.EventDict]
) -> None:
    before = processes()
    assert len(before) == 2

    def do(job: Any) -> Any:
        try:
            return pool.call(job)
        except WorkerDied:
            return "died"

    jobs = [("double", number) for number in range(8)]
    jobs.insert(3, ("die", signal.SIGKILL))
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(do, jobs))
    assert found == [0, 2, 4, "died", 6, 8, 10, 12, 14]
    replaced()
    assert [event["exit_code"] for event in logged if event["event"] == "workers.process_died"] == [-signal.SIGKILL]
    assert len(processes()) == 2
    assert len(processes() - before) == 1


def test_a_process_that_died_while_idle_costs_no_job(pool: WorkerPool) -> None:
    killed = pool.call(("pid", None))
    os.kill(killed, signal.SIGKILL)
    while psutil.Process(killed).status() != psutil.STATUS_ZOMBIE:
        pass
    assert [pool.call(("double", number)) for number in range(4)] == [0, 2, 4, 6]
    replaced()
    assert len(processes()) == 2
    assert killed not in processes()


def test_what_cannot_be_sent_loses_no_process(pool: WorkerPool) -> None:
    with pytest.raises(TypeError, match="pickle"):
        pool.call(("double", threading.Lock()))
    with pytest.raises((WorkerDied, JobFailed)):
        pool.call(("unpicklable", None))
    replaced()
    assert {pool.call(("double", number)) for number in range(4)} == {0, 2, 4, 6}
    assert len(processes()) == 2


@pytest.mark.parametrize(("start", "said"), [("raise", "no luck"), ("die", r"ended its process \(exit code 7\)")])
def test_work_that_cannot_be_opened_is_told(start: str, said: str) -> None:
    before = processes()
    with pytest.raises(ConfigError, match=said):
        WorkerPool("odd", Odd(start), 1)
    assert processes() == before


def test_long_work_reaches_all_processes() -> None:
    with closing(WorkerPool("odd", Odd(text="x" * 10**7), 2)) as opened:
        assert opened.call(("double", 4)) == 8


def test_closing_ends_the_processes_and_whatever_they_do(tmp_path: Path) -> None:
    before, began = processes(), tmp_path / "began"
    opened = WorkerPool("odd", Odd(), 1)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(opened.call, ("touch", str(began)))
        while not began.exists():
            assert not waiting.done()
        opened.close()
        with pytest.raises(EngineStopped):
            waiting.result(60)
    assert processes() == before
    with pytest.raises(EngineStopped):
        opened.call(("double", 1))
    replaced()


def test_processes_end_with_the_pool_that_nobody_holds() -> None:
    before = processes()
    opened = WorkerPool("odd", Odd(), 1)
    assert len(processes() - before) == 1
    del opened
    assert processes() == before
