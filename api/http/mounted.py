"""The server as an ASGI application, for a host with connections of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, fields
from typing import Final

import anyio
import anyio.to_thread

from staged_pool.api import status
from staged_pool.api.addresses import below_mount
from staged_pool.api.app.app import Application
from staged_pool.api.app.batch_service import batches_of
from staged_pool.api.app.dialects import error_format_of
from staged_pool.api.app.engine_registry import RETRY_AFTER_S, EngineRegistry
from staged_pool.api.asgi import Message, Receive, Scope, Send
from staged_pool.api.config import ServerConfig
from staged_pool.api.http.general_path import GeneralPath
from staged_pool.api.limits.server_state import ServerState
from staged_pool.api.tracing.opening import traces_of
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.host_loop import OwnTask
from staged_pool.runtime.engine.open import governor_for, open_engines
from staged_pool.runtime.memory.governor import MemoryGovernor
from staged_pool.stages.errors import ConfigError, EngineStopped
from staged_pool.stages.exception_groups import only_error, single_errors

OF_CONNECTIONS: Final = frozenset(
    {
        *("host", "port", "unix_socket", "quic_port", "tls_cert", "tls_key", "tls_ca"),
        *("head_timeout_s", "keep_alive_s", "write_timeout_s", "max_connections", "drain_lead_s"),
    }
)
"""Settings of connections, which a mounted server leaves to its host."""

HOW_TO_START: Final = (
    "nothing runs its lifespan. Give `lifespan=pool.lifespan` to the application that it is mounted in, or enter "
    "`async with pool.running():` in the lifespan of that application"
)
"""Advice for the programmer of the host, in which `pool` is the mounted server."""

LEFT: Final = 499
"""Status of the empty answer to a client that has left: some middlewares log an error without an answer."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Parts of a server while it runs; they belong to one event loop."""

    app: GeneralPath
    registry: EngineRegistry


class MountedServer:
    """The routes of a server, as an ASGI application without connections of its own.

    It runs while its lifespan does. If it is the root application, the host drives the lifespan. A host that mounts it
    below a path does not: use `lifespan` or `running`. Until then each request is answered 503.

    A client that leaves, and a host that cancels the call, cancel the request in the engine. Neither signals, logging
    nor the memory allocator of the process are touched.

    Args:
        models: Models to load, and engines that the host has open.
        server: Settings of HTTP, without those of connections.

    Raises:
        ConfigError: A setting of connections is given, which the host has to set.
    """

    def __init__(self, *models: EngineConfig | Engine, server: ServerConfig | None = None) -> None:
        self._configs = [model for model in models if isinstance(model, EngineConfig)]
        self._engines = [model for model in models if not isinstance(model, EngineConfig)]
        self._server = server or ServerConfig()
        self._is_taken = False
        """True from the beginning of a run to its end."""
        self._run: _Run | None = None
        """The run, once its models are loaded."""
        _check_for_host(self._server)

    @property
    def engines(self) -> Mapping[str, Engine]:
        """The engines by the names of their models.

        Raises:
            RuntimeError: The server does not run.
        """
        if self._run is None:
            raise RuntimeError(f"The server is not running: {HOW_TO_START}")
        return {engine.card.name: engine for engine in self._run.registry.engines}

    @property
    def engine(self) -> Engine:
        """The only engine.

        Raises:
            RuntimeError: The server does not run, or has several engines.
        """
        if len(engines := self.engines) > 1:
            raise RuntimeError(f"The server has several engines, by name in `engines`: {', '.join(engines)}")
        return next(iter(engines.values()))

    def running(self, *engines: Engine) -> OwnTask[Mapping[str, Engine]]:
        """Run the server for the length of a block, which gets the engines by name.

        The block begins when all models are loaded. At its end new requests are rejected, and the engines that were
        opened here drain as in `open_engines`. Engines of the host go on. One task may enter the block and another one
        of the same event loop leave it. After its end the server may run again.

        Args:
            engines: Engines that the host has opened meanwhile, beside those of the constructor.

        Raises:
            ConfigError: On entering: there is no model, a name is twice, or a model cannot be loaded as configured.
            RuntimeError: On entering: the server runs already.
        """
        return OwnTask(lambda: self._running([*self._engines, *engines]), "The mounted server")

    @asynccontextmanager
    async def lifespan(self, host: object) -> AsyncIterator[None]:
        """Run the server as the lifespan of a Starlette or FastAPI application: `FastAPI(lifespan=pool.lifespan)`.

        Args:
            host: That application; it is not read.
        """
        async with self.running():
            yield

    @asynccontextmanager
    async def _running(self, given: Sequence[Engine]) -> AsyncIterator[Mapping[str, Engine]]:
        if self._is_taken:
            raise RuntimeError("The server runs already: enter `running` once, or run its lifespan once")
        if not given and not self._configs:
            raise ConfigError("no model: give the server an EngineConfig, or an engine that is open")
        self._is_taken = True
        try:
            with single_errors():
                async with self._opened(given) as self._run:
                    yield self.engines
        finally:
            self._is_taken, self._run = False, None

    @asynccontextmanager
    async def _opened(self, given: Sequence[Engine]) -> AsyncIterator[_Run]:
        memory = given[0].memory if given else governor_for(self._configs[0])
        state = ServerState(memory)
        async with anyio.create_task_group() as background, AsyncExitStack() as stack:
            stack.callback(background.cancel_scope.cancel)
            stack.callback(state.forget_memory)
            background.start_soon(state.watch)
            if not given:
                await anyio.to_thread.run_sync(memory.measure)
                background.start_soon(memory.watch)
            registry = await stack.enter_async_context(self._open_registry(given, memory))
            batches = await stack.enter_async_context(batches_of(self._server, registry))
            if batches is not None:
                batches.runner.start()
            tracer = await stack.enter_async_context(traces_of(self._server))
            application = Application(registry, state, self._server, batches=batches, tracer=tracer)
            try:
                yield _Run(GeneralPath.before(application, self._server.cors_origins), registry)
            finally:
                registry.close("the server is draining")
                state.end()
                if batches is not None:
                    batches.runner.stop()

    @asynccontextmanager
    async def _open_registry(self, given: Sequence[Engine], memory: MemoryGovernor) -> AsyncIterator[EngineRegistry]:
        """Open the engines, and take requests for them and for those of the host."""
        async with AsyncExitStack() as stack:
            engines = {engine.card.name: engine for engine in given}
            if self._configs:
                engines |= await stack.enter_async_context(open_engines(self._configs, memory))
            if len(engines) < len(given) + len(self._configs):
                raise ConfigError("served_name: two models have the same name; name them apart")
            registry = EngineRegistry()
            registry.open(*engines.values())
            yield registry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._follow_lifespan(receive, send)
        elif scope["type"] == "http":
            await self._answer(below_mount(scope), receive, send)
        else:  # a WebSocket: its host answers the handshake with 403
            await receive()
            await send({"type": "websocket.close", "code": 1000})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._run is None:
            await _send_not_running(scope, send)
            return
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        await self._run.app(scope, receive, watched)
        if not begun:
            await send({"type": "http.response.start", "status": LEFT, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})

    async def _follow_lifespan(self, receive: Receive, send: Send) -> None:
        """Run the server between the two messages of ASGI's lifespan protocol."""
        phase = "startup"
        try:
            await receive()
            async with self.running():
                await send({"type": "lifespan.startup.complete"})
                phase = "shutdown"
                await receive()
        except Exception as error:
            await send({"type": f"lifespan.{phase}.failed", "message": str(only_error(error))})
            raise
        await send({"type": "lifespan.shutdown.complete"})


def _check_for_host(server: ServerConfig) -> None:
    """Reject settings of connections, which would have no effect, and those of another process."""
    if server.admin_api_keys or server.models_memory_bytes is not None:
        raise ConfigError("admin_api_key=...: is for `staged-pool serve`; a host loads models by `open_engines`")
    for row in fields(server):
        if row.name in OF_CONNECTIONS and (value := getattr(server, row.name)) != row.default:
            message = "a mounted server has no connections; set it for the server that runs this application"
            raise ConfigError(f"{row.name}={value!r}: {message}")


async def _send_not_running(scope: Scope, send: Send) -> None:
    problem = status.problem(EngineStopped(f"The server is not running: {HOW_TO_START}", retry_after_s=RETRY_AFTER_S))
    code, body = error_format_of(scope["path"])(problem)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *problem.headers()]
    await send({"type": "http.response.start", "status": code, "headers": headers})
    await send({"type": "http.response.body", "body": body})
