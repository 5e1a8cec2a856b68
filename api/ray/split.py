"""Split form: preparer replicas with HTTP and preprocess, in front of engine replicas with the weights."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio
from ray import serve
from ray.serve.deployment import Application
from ray.serve.handle import DeploymentHandle

from staged_pool.api.app.engine_registry import EngineRegistry
from staged_pool.ray.door import Door
from staged_pool.ray.engine_replica import EngineReplica
from staged_pool.ray.lines import Lines
from staged_pool.ray.mounted import MountedOnServe
from staged_pool.ray.options import LEAD_S, common_options
from staged_pool.ray.process import begin
from staged_pool.ray.registry import LineRegistry
from staged_pool.ray.settings import Settings
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.open_front import front_parts
from staged_pool.runtime.memory.governor import MemoryGovernor
from staged_pool.stages.log import get_logger

ENGINE: Final = "engine"
"""Default name of the deployment with the weights."""

PREPARER: Final = "preparer"
"""Default name of the deployment that takes HTTP."""

DRAIN_LOOP_S: Final = 0.2
"""Seconds between two looks of Serve for requests of a replica that ends. An engine replica has none."""

ANSWER_S: Final = 5.0
"""Longest wait for the doors of all engine replicas, in seconds."""

log = get_logger("staged_pool.ray")


class PreparerServer(MountedOnServe):
    """The server of a preparer: its engines compute in engine replicas.

    Args:
        settings: Settings of the server and its models.
        engines: The deployment of the engine replicas.
    """

    def __init__(self, settings: Settings, engines: DeploymentHandle[EngineReplica]) -> None:
        super().__init__(*settings.models, server=settings.server)
        self._handle = engines

    @asynccontextmanager
    async def _open_registry(self, given: Sequence[Engine], memory: MemoryGovernor) -> AsyncIterator[EngineRegistry]:
        """Open lines to the engine replicas, and take requests once the first one is open."""
        registry = LineRegistry()
        async with front_parts(self._configs, memory) as parts, anyio.create_task_group() as tasks:
            lines = Lines(self._find, parts, registry)
            tasks.start_soon(lines.run)
            await lines.wait()
            try:
                yield registry
            finally:
                lines.close()

    async def _find(self) -> Sequence[Door]:
        """Ask all engine replicas for their doors. A replica that does not answer has none."""
        try:
            answers = self._handle.broadcast("door").results_async(timeout_s=ANSWER_S, return_exceptions=True)
            return [Door(*each) for each in await answers if not isinstance(each, BaseException)]
        except Exception as error:  # noqa: BLE001  # Ray raises many kinds while there is no replica
            log.info("engine.none", reason=type(error).__name__)
            return []


@serve.ingress()
class Preparer:
    """HTTP, parse, preprocess and postprocess. It loads no weights.

    Args:
        settings: Settings of the server and its models.
        engines: The deployment of the engine replicas.
    """

    app: PreparerServer
    """The server, which Serve's base class keeps."""

    def __init__(self, settings: Settings, engines: DeploymentHandle[EngineReplica]) -> None:
        self._settings = begin(settings)
        self._engines = engines

    def __serve_build_asgi_app__(self) -> PreparerServer:
        """Return the server for Serve, which runs its lifespan."""
        return PreparerServer(self._settings, self._engines)


def split(settings: Settings, preparers: Mapping[str, Any], options: Mapping[str, Any]) -> Application:
    """Make an application of two deployments.

    Args:
        settings: Settings of the server and its models.
        preparers: Options of the deployment of preparers.
        options: Options of the deployment of engines.

    Raises:
        ValueError: Serve rejects an option.
    """
    common = common_options(settings)
    of_engines = {
        **common,
        "name": ENGINE,
        "graceful_shutdown_timeout_s": common["graceful_shutdown_timeout_s"] + LEAD_S,
        "graceful_shutdown_wait_loop_s": DRAIN_LOOP_S,
        **options,
    }
    of_preparers = {
        **common,
        "name": PREPARER,
        "max_ongoing_requests": settings.server.max_http_requests,  # fewer would wait where nobody predicts their delay
        **preparers,
    }
    engines = serve.deployment(EngineReplica).options(**of_engines).bind(settings)
    return serve.deployment(Preparer).options(**of_preparers).bind(settings, engines)
