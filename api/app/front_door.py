"""Front door: decides for each request to reject, to answer at once, or to let in.

Both the fast and the general path call it, twice for each request. Before the body is read, it checks the key and the
limits by the headers alone. Once the body is here, it checks if the engine has room for a request of its size.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from staged_pool.api import status
from staged_pool.api.addresses import MODEL, Addresses
from staged_pool.api.app.call import ENGINE, Answer, priority_of
from staged_pool.api.app.engine_registry import EngineRegistry
from staged_pool.api.app.operation_routes import answer_alive
from staged_pool.api.app.tasks import TASKS
from staged_pool.api.asgi import Scope
from staged_pool.api.cors import is_preflight
from staged_pool.api.keys import TENANT, Keys, is_admin
from staged_pool.api.limits.request_limits import RequestLimits, is_open
from staged_pool.api.limits.uploads import BATCHES, FILES
from staged_pool.api.status import Problem
from staged_pool.api.wire.exchange import Body
from staged_pool.runtime.engine.engine import Engine
from staged_pool.stages.scheduling.entries import Priority

_BATCHES_OFF: Final = Problem(
    kind=status.NO_ROUTE, message="Files and batches are off; `staged-pool serve --batch-dir FOLDER` turns them on."
)

_ADMIN_OFF: Final = Problem(
    kind=status.NO_ROUTE,
    message="Models are fixed at the start; `staged-pool serve --admin-api-key KEY` turns the routes below /admin on.",
)


class FrontDoor:
    """Decides about the requests of one server.

    Args:
        registry: The engines.
        limits: Limits of the server.
        keys: API keys of the server.
        addresses: Finds the route and the model in a target.
        alive: Method and path of the liveness probes.
    """

    def __init__(
        self,
        registry: EngineRegistry,
        limits: RequestLimits,
        keys: Keys,
        addresses: Addresses,
        alive: Collection[tuple[str, str]],
    ) -> None:
        self._registry = registry
        self.limits = limits
        self._keys = keys
        self._addresses = addresses
        self._alive = alive

    def reject(self, scope: Scope) -> Problem | None:
        """Decide by the headers, before the body is read. Return the problem of a rejected request, or None."""
        self._addresses.place(scope)
        if not (self.limits.config.cors_origins and is_preflight(scope)):
            problem = self._keys.admit(scope)
            if problem is not None:
                return problem
        if self.limits.config.batch_dir is None and scope["path"].startswith((FILES, BATCHES)):
            return _BATCHES_OFF
        if not self.limits.config.admin_api_keys and is_admin(scope["path"]):
            return _ADMIN_OFF
        if is_open(scope):  # probes are subject to no limit
            return None
        return self.limits.too_many_connections(scope) or self.limits.too_many(scope)

    def decide(self, scope: Scope, body: Body) -> Problem | Answer | None:
        """Decide about a complete request that `reject` has not rejected.

        Returns:
            The problem of a rejected request, or the answer to a liveness probe. None: the request enters, and its
            scope has the engine under `ENGINE` if only one is possible.
        """
        asked = scope["method"], scope["path"]
        if asked in self._alive:
            return answer_alive() if scope[MODEL] is None else None
        engine = self._engine(scope)
        if engine is None:
            return None
        task = TASKS[scope["path"]]
        if task.model_of is None:  # otherwise the body names its model in the dialect's own way
            scope[ENGINE] = engine
        if not body or not engine.expects_rejections:
            return None
        headers = dict(scope["headers"])
        priority = priority_of(headers) or Priority.INTERACTIVE  # an invalid priority is rejected later
        images = task.shown_images(engine.card, body, headers.get(b"content-type", b""))
        overloaded = engine.overload(len(body), priority=priority, tenant=scope.get(TENANT), images=images)
        return None if overloaded is None else status.problem(overloaded)

    def _engine(self, scope: Scope) -> Engine | None:
        """Return the only possible engine of a task; None if its body or its handler decides."""
        engines = self._registry.engines
        if len(engines) != 1 or scope["method"] != "POST" or self._registry.not_ready:
            return None
        task, name = TASKS.get(scope["path"]), engines[0].card.name
        if task is None or scope[MODEL] not in (None, name):
            return None
        return engines[0] if task.able(engines[0].card) else None
