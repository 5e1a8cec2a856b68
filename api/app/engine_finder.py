"""Search for the engine of a request, by its body and its path."""

from __future__ import annotations

from functools import partial

from staged_pool.api.app.body_reader import BodyReader
from staged_pool.api.app.engine_choice import check_able, pick
from staged_pool.api.app.engine_registry import EngineRegistry
from staged_pool.api.app.tasks import Task
from staged_pool.api.wire.exchange import Body
from staged_pool.runtime.engine.engine import Engine
from staged_pool.stages.errors import InvalidInput


class EngineFinder:
    """Finds the engines of requests.

    Args:
        registry: The engines.
        bodies: Reads bodies.
    """

    def __init__(self, registry: EngineRegistry, bodies: BodyReader) -> None:
        self._registry = registry
        self._bodies = bodies

    async def task_of(self, task: Task, body: Body, boundary: bytes | None = None) -> Task:
        """Return the task of a body: that of its path, or the other one there if the body asks for it.

        Args:
            task: Task of the path.
            body: Body of the request.
            boundary: See `find`. A form asks for no other task.

        Raises:
            InvalidInput: The body is no JSON object.
        """
        other = task.other
        if other is None or boundary is not None or not other.may_ask(body):
            return task
        return other.task if await self._bodies.peek(other.asks, body) else task

    async def find(self, task: Task, body: Body, boundary: bytes | None = None, placed: str | None = None) -> Engine:
        """Return the engine of the named model; without a name, the only suitable one.

        Args:
            task: Task of the request.
            body: Body of the request.
            boundary: Boundary of a form. None: the body is JSON.
            placed: Model that the path names. None: it names none.

        Raises:
            HttpError: No model supports the task.
            StagedPoolError: The named model is unknown, unable or not ready; or several are suitable.
        """
        engines = self._registry.engines
        name: str | None = None
        if task.model_of is not None:
            name = await self._bodies.peek(
                partial(task.model_of, served=[engine.card.name for engine in engines]), body
            )
        elif len(engines) > 1:
            name = await self._bodies.model_of(body, boundary)
        if placed is not None:
            if name not in (None, "", placed) and any(name == engine.card.name for engine in engines):
                message = f"model: the path names the model `{placed}`, but the body names `{name}`; drop one of them"
                raise InvalidInput(message, param="model")
            name = placed
        if name:
            engine = self._registry.enter(name)
            check_able(task, engine, engines)
            return engine
        several = len(engines) > 1 and boundary is None
        narrowed = await self._bodies.peek(task.narrow, body) if task.narrow and several else None
        return self._registry.enter(pick(task, self._registry.engines, narrowed).card.name)
