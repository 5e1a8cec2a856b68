"""Pools of worker processes: their jobs, their crashes and their end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import structlog

from staged_pool.runtime.workers.jobs import Failed, JobCancelled, JobFailed, WorkerDied
from staged_pool.runtime.workers.pipe import MEMORY_BYTES
from staged_pool.runtime.workers.pool import Call, Machine, WorkerPool
from staged_pool.runtime.workers.process import WorkerProcess
from staged_pool.stages.errors import ConfigError, EngineStopped, TooLarge, UnusableMedia
from tests.servers.preloaded import ROOT
from tests.support.worker_processes import make_zombie, prepare_zombie, processes, replaced


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
        if self.start == "hang":
            Path(self.text).touch()
            time.sleep(600)
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
            case "raise own":
                raise {"Wordless": Wordless, "Unpicklable": Unpicklable, "Choosy": Choosy}[value](1, 2)
            case "exit":
                raise SystemExit("a secret")
            case "die":
                os.kill(os.getpid(), value)
            case "touch":
                Path(value).touch()
                time.sleep(600)
            case "stay":
                (value / str(os.getpid())).touch()
                while not (value / "go").exists():
                    time.sleep(0.001)
            case "unpicklable":
                return threading.Lock()
            case "zombie":
                return prepare_zombie()
            case "fork":
                if (child := os.fork()) == 0:
                    time.sleep(600)
                return child
            case "exec":
                return subprocess.Popen(["sleep", "600"], close_fds=False).pid


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Unpicklable(Exception):
    def __reduce__(self) -> Any:
        raise RuntimeError("no pickle")


class Choosy(Exception):
    def __init__(self, one: int, other: int) -> None:
        super().__init__("its own arguments are lost")


class Fatal:
    """A job that ends the process in which it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[int]]:
        return os._exit, (3,)


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


def test_processes_that_died_while_idle_cost_no_job(pool: WorkerPool) -> None:
    killed = processes()
    for process in killed:
        os.kill(process, signal.SIGKILL)
    assert [pool.call(("double", number)) for number in range(4)] == [0, 2, 4, 6]
    replaced()
    assert len(processes()) == 2
    assert not processes() & killed


def test_a_process_that_is_half_dead_costs_no_job(pool: WorkerPool, logged: list[structlog.typing.EventDict]) -> None:
    half_dead = pool.call(("zombie", None))
    make_zombie(half_dead)
    assert [pool.call(("double", number)) for number in range(4)] == [0, 2, 4, 6]
    replaced()
    assert [event["exit_code"] for event in logged if event["event"] == "workers.process_died"] == [9]
    assert len(processes()) == 2
    assert half_dead not in processes()


def test_a_process_that_dies_of_the_pickle_of_a_job_fails_it(pool: WorkerPool) -> None:
    before = processes()
    with pytest.raises(WorkerDied):
        pool.call(Fatal())
    replaced()
    assert len(processes() - before) == 1, "the job went to another process, and killed that too"


def test_the_processes_that_a_job_has_started_do_not_keep_its_call(pool: WorkerPool) -> None:
    for kind in ("fork", "exec"):
        started = pool.call((kind, None))
        worker = pool.call(("pid", None))
        try:
            with pytest.raises(WorkerDied):
                pool.call(("die", signal.SIGKILL))
            assert psutil.pid_exists(started)
        finally:
            os.kill(started, signal.SIGKILL)
        replaced()
        assert worker not in processes()


def test_a_pool_without_processes_asks_for_them_again_at_each_call() -> None:
    machine = Scarce()
    with closing(WorkerPool("odd", Odd(), 1, machine=Machine(machine.process))) as opened:
        machine.is_empty = True
        with pytest.raises(WorkerDied):
            opened.call(("die", signal.SIGKILL))
        replaced()
        for _ in range(2):
            with pytest.raises(WorkerDied, match="no more processes"):
                opened.call(("double", 1))
        machine.is_empty = False
        assert opened.call(("double", 2)) == 4
        assert machine.tries == 3


def test_a_pool_without_threads_replaces_its_processes_all_the_same() -> None:
    def no_thread(function: Callable[[], None]) -> None:
        raise RuntimeError("can't start new thread")

    with closing(WorkerPool("odd", Odd(), 1, machine=Machine(thread=no_thread))) as opened:
        with pytest.raises(WorkerDied):
            opened.call(("die", signal.SIGKILL))
        assert opened.call(("double", 2)) == 4


class Scarce:
    """An operating system that may have no processes."""

    def __init__(self) -> None:
        self.is_empty = False
        self.tries = 0

    def process(self, pool: str) -> WorkerProcess:
        if self.is_empty:
            self.tries += 1
            raise BlockingIOError("no more processes")
        return WorkerProcess(pool)


def test_a_lazy_pool_starts_processes_as_calls_need_them(tmp_path: Path) -> None:
    before = processes()
    with closing(WorkerPool("odd", Odd(), 2, lazily=True)) as opened, ThreadPoolExecutor(3) as threads:
        assert processes() == before
        assert [opened.call(("double", number)) for number in range(3)] == [0, 2, 4]
        assert len(processes() - before) == 1
        waiting = [threads.submit(opened.call, ("stay", tmp_path)) for _ in range(3)]
        while len(list(tmp_path.iterdir())) < 2:
            pass
        assert len(processes() - before) == 2
        (tmp_path / "go").touch()
        assert [each.result(60) for each in waiting] == [None] * 3
        assert len(processes() - before) == 2
    assert processes() == before


def test_a_cancelled_call_ends_with_its_process_alone(
    pool: WorkerPool, tmp_path: Path, logged: list[structlog.typing.EventDict]
) -> None:
    before, call = processes(), Call()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(pool.answer, ("touch", str(tmp_path / "began")), call)
        while not (tmp_path / "began").exists():
            assert not waiting.done()
        pool.cancel(call)
        with pytest.raises(JobCancelled):
            waiting.result(60)
    assert pool.call(("double", 1)) == 2
    replaced()
    assert len(before - processes()) == 1
    assert not [event for event in logged if event["event"] == "workers.process_died"]
    pool.cancel(call)  # too late: its process is nobody's
    with pytest.raises(JobCancelled):
        pool.answer(("double", 1), call)
    assert [pool.call(("double", number)) for number in range(4)] == [0, 2, 4, 6]


def test_a_call_that_waits_for_a_process_may_be_cancelled(tmp_path: Path) -> None:
    with closing(WorkerPool("odd", Odd(), 1)) as opened, ThreadPoolExecutor(2) as threads:
        first, call = threads.submit(opened.call, ("stay", tmp_path)), Call()
        while not list(tmp_path.iterdir()):
            pass
        second = threads.submit(opened.answer, ("double", 1), call)
        opened.cancel(call)
        with pytest.raises(JobCancelled):
            second.result(60)
        (tmp_path / "go").touch()
        assert first.result(60) is None


def test_a_call_may_be_cancelled_while_its_process_starts(tmp_path: Path) -> None:
    before, call = processes(), Call()
    began = tmp_path / "began"
    with (
        closing(WorkerPool("odd", Odd("hang", str(began)), 1, lazily=True)) as opened,
        ThreadPoolExecutor(1) as threads,
    ):
        waiting = threads.submit(opened.answer, ("double", 1), call)
        while not began.exists():
            assert not waiting.done()
        opened.cancel(call)
        with pytest.raises(JobCancelled):
            waiting.result(60)
        assert processes() == before


def test_what_cannot_be_pickled_fails_its_job_alone(pool: WorkerPool) -> None:
    before = processes()
    with pytest.raises(TypeError, match="pickle"):
        pool.call(("double", threading.Lock()))
    with pytest.raises(JobFailed):
        pool.call(("unpicklable", None))
    assert {pool.call(("double", number)) for number in range(4)} == {0, 2, 4, 6}
    assert processes() == before


@pytest.mark.parametrize("error", ["Wordless", "Unpicklable", "Choosy"])
def test_errors_that_cannot_be_sent_are_told_by_name(pool: WorkerPool, error: str) -> None:
    answer = pool.answer(("raise own", error))
    assert isinstance(answer, Failed)
    assert (answer.kind, answer.error) == (error, None)
    assert "in do" in answer.trace


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


SENT = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def test_signals_that_can_be_handled_cost_no_job(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A service manager sends them to all processes of a server that drains."""
    before = processes()
    with closing(WorkerPool("odd", Odd(), 1)) as opened:
        (worker,) = processes() - before
        for number in SENT:
            os.kill(worker, number)  # while it is idle
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(opened.call, ("stay", tmp_path))
            while not list(tmp_path.iterdir()):
                assert not waiting.done()
            with suppress(ProcessLookupError):  # the signals before have ended it
                for number in SENT:
                    os.kill(worker, number)
            (tmp_path / "go").touch()
            waiting.result(60)
        assert opened.call(("pid", None)) == worker
    assert "Current thread" in capfd.readouterr().err  # for SIGUSR1 and SIGUSR2


HOLDER = """
import os, signal, sys, threading
from pathlib import Path
from tests.runtime.workers.test_pool import Odd
from staged_pool.runtime.workers.pool import WorkerPool
from tests.support.worker_processes import processes

pool, began = WorkerPool("odd", Odd(), 1), Path(sys.argv[1])
threading.Thread(target=pool.call, args=(("touch", str(began)),), daemon=True).start()
while not began.exists():
    pass
print(*processes(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_in_a_job_without_end_does_not_outlive_its_program(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "began")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        worker = int(holder.stdout.readline())
        try:
            holder.communicate(timeout=30)  # the worker has the same stderr, which ends with both of them
        except subprocess.TimeoutExpired:
            os.kill(worker, signal.SIGKILL)
            raise
    assert holder.returncode == -signal.SIGKILL


def test_processes_end_with_the_pool_that_nobody_holds() -> None:
    before = processes()
    opened = WorkerPool("odd", Odd(), 1)
    assert len(processes() - before) == 1
    del opened
    assert processes() == before
