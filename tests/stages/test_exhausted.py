"""A failed allocation is told from a fault of the input, wherever it happens."""

from __future__ import annotations

import errno
from typing import Any

import anyio
import pytest

from staged_pool.stages.errors import ModelFailed, OutOfMemory, StagedPoolError
from staged_pool.stages.exhausted import is_out_of_memory
from staged_pool.stages.isolate import run_isolated
from staged_pool.stages.meter import StageMeter
from staged_pool.stages.supervise import RestartPolicy, Supervisor
from staged_pool.stages.user_code import Panic

ONEDNN = "could not create a memory object"
TORCH = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried 8 bytes"


def caused_by(cause: Exception) -> Exception:
    error = ValueError("the model failed")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError(ONEDNN),
        RuntimeError(TORCH),
        RuntimeError("std::bad_alloc"),
        RuntimeError("can't start new thread"),
        caused_by(MemoryError()),
        caused_by(RuntimeError(ONEDNN)),
    ],
)
def test_an_allocation_has_failed(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shapes do not match"),
        OSError(errno.ENOENT, "x"),
        ValueError("out of memory"),
        KeyError("bad_alloc"),
    ],
)
def test_what_a_caller_wrote_or_a_bug_is_no_failed_allocation(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_a_circle_of_causes_ends() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert not is_out_of_memory(first)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError(ONEDNN), RuntimeError(TORCH), Panic("PanicException", "memory allocation")]
)
async def test_an_input_for_which_there_is_no_memory_may_be_sent_again(error: Exception) -> None:
    async def run(payloads: Any) -> list[str | StagedPoolError]:
        if "large" in payloads:
            raise error
        return list(payloads)

    small, large, bad = await run_isolated(run, ["a", "large", "b"], stage="preprocess")
    assert (small, bad) == ("a", "b")
    is_memory = not isinstance(error, Panic)
    assert isinstance(large, OutOfMemory if is_memory else ModelFailed)
    if is_memory:
        assert str(large) == "There was no memory for this request in the preprocess stage; it may be sent again."


@pytest.mark.anyio
async def test_workers_that_find_no_memory_do_not_break_their_stage() -> None:
    policy = RestartPolicy(max_crashes=1, first_delay_s=0.0, max_delay_s=0.0)
    meter = StageMeter("here", 1)
    tries = 0

    async def worker() -> None:
        nonlocal tries
        tries += 1
        await anyio.lowlevel.checkpoint()
        if tries < 10:
            raise MemoryError

    await Supervisor(meter, policy).run(worker)
    assert (tries, meter.crashes) == (10, 0)
