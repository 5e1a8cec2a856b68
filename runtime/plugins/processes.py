"""Processes of their own for plain hooks that would hold the interpreter's lock."""

from __future__ import annotations

import multiprocessing  # noqa: F401  # makes the program known as `__mp_main__`, which its classes are of in a worker
import pickle
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, TypeAlias

import anyio
import anyio.lowlevel
import anyio.to_thread

from staged_pool.runtime.plugins.hooks import Hook, HookName
from staged_pool.runtime.plugins.processor import PluginContext
from staged_pool.runtime.workers.jobs import Done, Failed, JobCancelled, JobFailed
from staged_pool.runtime.workers.pool import Call, WorkerPool
from staged_pool.stages.exception_groups import single_errors
from staged_pool.stages.user_code import as_exception, user_code

Job: TypeAlias = tuple[HookName, object, str, Any]
"""Name of the hook, its value, and the id and the state of the context."""


class HookProcesses:
    """Runs the plain hooks of one plugin in processes. Its block takes one of `limit` places.

    A process is started for a call that finds none idle, and kept for further ones. It gets a copy of the plugin when
    it starts. A cancelled call ends with its process at once.

    Args:
        plugin: Name of the plugin, for the log.
        hooks: Hooks that run in processes.
        limit: Most calls at once.
    """

    def __init__(self, plugin: str, hooks: Mapping[HookName, Hook], limit: int) -> None:
        self._hooks = hooks
        self._places = anyio.CapacityLimiter(limit)
        self._threads = anyio.CapacityLimiter(limit)
        self._pool = WorkerPool(plugin, HookWork(hooks), limit, lazily=True)

    async def __aenter__(self) -> None:
        await self._places.acquire()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._places.release()

    async def run(self, hook: Hook, value: object, context: PluginContext) -> tuple[Any, Any]:
        """Run a hook on copies of the value and the context. Returns its result, and the state of the context.

        Raises:
            Exception: The hook has raised it; or something cannot be pickled.
            JobFailed: The hook has raised an error that cannot be pickled.
            WorkerDied: The process has ended, such as for lack of memory.
        """
        job: Job = hook.name, value, context.id, context.state
        with single_errors():
            async with anyio.create_task_group() as tasks:
                call = Call()
                tasks.start_soon(self._cancel_with_caller, call)
                try:
                    answer = await anyio.to_thread.run_sync(self._answer, job, call, limiter=self._threads)
                except JobCancelled:
                    await anyio.lowlevel.checkpoint()  # raises the cancellation
                    raise
                tasks.cancel_scope.cancel()
        if isinstance(answer, Done):
            result, state = answer.result
            return result, state
        raise _error_of(answer)

    def _answer(self, job: Job, call: Call) -> Done | Failed:
        with user_code():  # values are pickled
            return self._pool.answer(job, call)

    async def _cancel_with_caller(self, call: Call) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            self._pool.cancel(call)

    async def close(self) -> None:
        """End the processes, if the plugin has hooks for them."""
        if not self._hooks:
            return
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._pool.close, limiter=self._threads)


def _error_of(failed: Failed) -> Exception:
    error = failed.error
    found = JobFailed(str(failed)) if error is None else as_exception(error)
    found.add_note(f"In the worker process:\n{failed.trace}")
    return found


class HookWork:
    """Work of processes that run hooks.

    The hooks are pickled apart: their classes are found only where `open` has made this program's modules known.

    Args:
        hooks: The hooks.
    """

    def __init__(self, hooks: Mapping[HookName, Hook]) -> None:
        self._hooks = hooks

    def __getstate__(self) -> tuple[Sequence[str], str | None, bytes]:
        main = getattr(sys.modules["__main__"], "__file__", None)
        return sys.path, main, pickle.dumps(self._hooks, protocol=5)

    def __setstate__(self, state: tuple[Sequence[str], str | None, bytes]) -> None:
        self._path, self._main, self._pickled = state

    def open(self) -> Callable[[Job], tuple[Any, Any]]:
        sys.path[:] = self._path
        if self._main is not None and Path(self._main).is_file():
            main = ModuleType("__mp_main__")  # by this name, the program does not run
            sys.modules["__main__"] = sys.modules["__mp_main__"] = main
            main.__dict__.update(runpy.run_path(self._main, run_name="__mp_main__"))
        hooks: Mapping[HookName, Hook] = pickle.loads(self._pickled)
        return lambda job: _run(hooks, *job)


def _run(hooks: Mapping[HookName, Hook], name: HookName, value: object, request_id: str, state: Any) -> tuple[Any, Any]:
    context = PluginContext(request_id)
    context.state, context.hook = state, name
    return hooks[name](value, context), context.state
