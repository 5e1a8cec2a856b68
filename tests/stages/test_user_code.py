"""The boundary to code of users: what passes it, and what becomes an error of the call."""

from __future__ import annotations

import ast
import asyncio
import copy
import pickle
import types
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

import staged_pool
from staged_pool.stages.user_code import Panic, as_exception, kind_of, run_guarded, user_code
from tests.conftest import BACKENDS
from tests.support.user_code import BAD_ENDS, BadEnd, RustPanic, stray_cancellation

ROOT = Path(next(iter(staged_pool.__path__)))


@pytest.mark.anyio
@pytest.mark.parametrize("end", BAD_ENDS)
async def test_what_is_no_exception_is_an_error_of_the_call_that_is_awaited(end: BadEnd) -> None:
    with pytest.raises(Panic) as caught:
        async with user_code():
            await end.awaited()
    assert kind_of(caught.value).startswith(end.kind)
    await anyio.lowlevel.checkpoint()  # nothing of a cancellation is left in this task


@pytest.mark.parametrize("error", [SystemExit(3), RustPanic("boom"), asyncio.CancelledError(), GeneratorExit()])
def test_what_is_no_exception_is_an_error_of_a_plain_call(error: BaseException) -> None:
    with pytest.raises(Panic) as caught, user_code():
        raise error
    assert (caught.value.kind, caught.value.__cause__) == (type(error).__name__, error)


@pytest.mark.parametrize("error", [ValueError("wrong"), KeyboardInterrupt()])
def test_other_errors_pass(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, user_code():
        raise error
    assert caught.value is error


@pytest.mark.anyio
async def test_a_cancellation_by_a_scope_passes() -> None:
    with anyio.CancelScope() as scope:
        scope.cancel()
        async with user_code():
            await anyio.sleep_forever()
    assert scope.cancelled_caught


@pytest.mark.anyio
async def test_a_deadline_passes_through_a_task_group_of_the_user() -> None:
    async def wait_in_a_group() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.sleep_forever)
            await anyio.sleep_forever()

    with anyio.move_on_after(0.001) as scope:
        async with user_code():
            await wait_in_a_group()
    assert scope.cancelled_caught


@pytest.mark.anyio
async def test_a_cancellation_behind_a_shield_is_an_error() -> None:
    with anyio.CancelScope() as outer:
        outer.cancel()
        with anyio.CancelScope(shield=True):
            with pytest.raises(Panic):
                async with user_code():
                    await stray_cancellation()


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", BACKENDS[:2])
async def test_a_host_that_cancels_the_task_of_its_caller_is_obeyed() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001), user_code(is_own_task=False):
            await anyio.sleep_forever()


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", BACKENDS[:2])
async def test_user_code_that_cancels_our_task_leaves_it_whole() -> None:
    task = asyncio.current_task()
    assert task is not None

    async def cancel_and_wait() -> None:
        task.cancel()
        await anyio.sleep_forever()

    with pytest.raises(Panic, match="no scope"):
        await run_guarded(cancel_and_wait)
    assert not task.cancelling()
    with anyio.move_on_after(0.001) as scope:
        await anyio.sleep_forever()
    assert scope.cancelled_caught


@pytest.mark.anyio
async def cancels_and_raises(task: asyncio.Task[None]) -> None:
    task.cancel()
    raise ValueError("own")


async def cancels_again(task: asyncio.Task[None]) -> None:
    task.cancel()
    try:
        await asyncio.sleep(0)
    except asyncio.CancelledError:
        task.cancel()
        raise


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", BACKENDS[:2])
@pytest.mark.parametrize("code", [cancels_and_raises, cancels_again])
async def test_a_cancel_beside_an_error_of_user_code_is_taken_back(
    code: Callable[[asyncio.Task[None]], Awaitable[None]],
) -> None:
    """Asyncio would take the task for cancelled, although it ends without an error: its group would end in silence."""
    goes_on: list[bool] = []

    async def ours() -> None:
        task = asyncio.current_task()
        assert task is not None
        with pytest.raises(Exception, match=r"own|no scope"):
            async with user_code():
                await code(task)
        assert task.cancelling() == 0

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ours)
        await anyio.wait_all_tasks_blocked()
        await anyio.lowlevel.checkpoint()
        goes_on.append(True)
    assert goes_on


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_coroutine_that_is_closed_ends_quietly(backend: str) -> None:
    """As one that is collected after its event loop: there is nobody to tell."""
    reached: list[str] = []

    @types.coroutine
    def waits() -> Iterator[None]:
        yield

    async def block() -> None:
        async with user_code():
            reached.append("inside")
            await waits()

    coroutine = block()

    async def begin() -> None:
        coroutine.send(None)

    anyio.run(begin, backend=backend)
    coroutine.close()
    assert reached == ["inside"]


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", BACKENDS[:2])
async def test_a_cancel_that_user_code_leaves_behind_strikes_nothing_of_ours() -> None:
    task = asyncio.current_task()
    assert task is not None
    async with user_code():
        task.cancel()
    assert not task.cancelling()
    await anyio.sleep(0.001)
    with anyio.move_on_after(1) as scope:
        async with user_code():
            scope.cancel()
        await anyio.sleep_forever()
    assert scope.cancelled_caught


@pytest.mark.anyio
@pytest.mark.parametrize("end", BAD_ENDS)
async def test_a_guarded_task_does_not_end_its_group_in_silence(end: BadEnd) -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run_guarded, end.awaited)
    (panic,) = caught.value.exceptions
    assert isinstance(panic, Panic)


@pytest.mark.parametrize("twin", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_a_panic_survives_a_copy(twin: Callable[[Panic], Panic]) -> None:
    panic = as_exception(SystemExit("the end"))
    assert isinstance(panic, Panic)
    other = twin(panic)
    assert (other.kind, str(other)) == ("SystemExit", "SystemExit: the end")


def _blocks() -> list[tuple[str, ast.With | ast.AsyncWith]]:
    """Return each block of `user_code` in the product, with its module."""
    return [
        (str(path.relative_to(ROOT)), node)
        for path in sorted(ROOT.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.With | ast.AsyncWith)
        and any("user_code(" in ast.unparse(item.context_expr) for item in node.items)
    ]


def test_no_plain_block_awaits_anything() -> None:
    wrong = [
        f"{module}:{block.lineno}"
        for module, block in _blocks()
        if isinstance(block, ast.With)
        for node in ast.walk(block)
        if isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith)
    ]
    assert not wrong, "a plain block would take a cancellation for an error of the user"
