"""The server: HTTP from the start, engines once they are loaded, and shutdown in order."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Final, TypeAlias

import anyio
import anyio.to_thread

from staged_pool.api.app.app import Application
from staged_pool.api.app.batch_service import Batches, batches_of
from staged_pool.api.app.engine_registry import EngineRegistry
from staged_pool.api.app.fleet import Fleet
from staged_pool.api.app.model_admin import ModelAdmin
from staged_pool.api.app.model_users import users_of
from staged_pool.api.config import ServerConfig
from staged_pool.api.http.accept import Acceptor, HypercornLog
from staged_pool.api.http.connection_lifecycle import ConnectionConfig
from staged_pool.api.http.fast_path import FastPath
from staged_pool.api.http.general_path import GeneralPath
from staged_pool.api.http.http3.protocol import Http3
from staged_pool.api.http.listener import SocketFile, url
from staged_pool.api.http.process_setup import allow_files
from staged_pool.api.http.tls import server_context
from staged_pool.api.limits.http_statistics import HttpStatistics
from staged_pool.api.limits.server_state import GRACE_S, ServerState
from staged_pool.api.process_memory import release_memory_of_loading, tune_garbage_collector
from staged_pool.api.tracing.opening import traces_of
from staged_pool.api.tracing.tracer import Tracer
from staged_pool.api.wire.model_admin import base_of
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.engine_group import EngineGroup
from staged_pool.runtime.engine.open import governor_for, open_engines
from staged_pool.runtime.machine.signals import end_signals, write_stacks_on_signals
from staged_pool.runtime.memory.governor import MemoryGovernor
from staged_pool.runtime.pipelines.file import PipelineFile, built_on
from staged_pool.stages.awake import call_awake_after
from staged_pool.stages.errors import DeviceLost
from staged_pool.stages.exception_groups import only_error, single_errors
from staged_pool.stages.log import get_logger
from staged_pool.stages.user_code import run_guarded

OVERDUE_S: Final = 3.0
"""Seconds added to the timeouts of a shutdown before the process is ended by force."""

SPARE_FILES: Final = 256
"""Open files other than connections: libraries, weights, event loops, logs."""

EXIT_OVERDUE: Final = 3
"""Exit code of a process that was ended by force."""

DRAINING: Final = "the server is draining"
"""Reason in `/ready` from SIGTERM on."""

OpenEngines: TypeAlias = Callable[
    [Sequence[EngineConfig], MemoryGovernor], AbstractAsyncContextManager[Mapping[str, Engine]]
]

log = get_logger("staged_pool.server")


async def serve(
    config: ServerConfig,
    models: Sequence[EngineConfig],
    listener: socket.socket,
    quic_listener: socket.socket | None = None,
    pipelines: Sequence[PipelineFile] = (),
    *,
    base: EngineConfig | None = None,
) -> None:
    """Run a server until it is told to stop. It handles the signals of the process, and may end the process.

    The first SIGTERM, SIGINT or SIGHUP drains the server. `/ready` turns 503. After `drain_lead_s` new requests are
    rejected, requests in flight have `drain_timeout_s` to finish, then the connections close. A second signal ends the
    process at once, and so does a shutdown that takes too long.

    Args:
        config: Settings of HTTP; `listener` stands for its host and port.
        models: Models to load, at least one; HTTP answers while they load.
        listener: A listening socket, see `bind`; the server closes it.
        quic_listener: A UDP socket for HTTP/3, see `bind_udp`; the server closes it. `config` has the certificate.
        pipelines: Pipelines to serve, on these models.
        base: See `Server`.

    Raises:
        ConfigError: A model cannot be loaded as configured.
        DeviceLost: An engine failed while it served.
    """
    allow_files(config.max_connections + SPARE_FILES)
    await Server(config, models, owns_process=True, pipelines=pipelines, base=base).run(listener, quic_listener)


class Server:
    """One HTTP server and its engines, in the caller's event loop, asyncio or trio.

    Args:
        config: Settings of HTTP.
        models: Models to load, at least one.
        owns_process: Handle signals, and end the process by force if a shutdown takes too long.
        open_engines: Opens the engines; replaced by a host with models of its own.
        pipelines: Pipelines to serve, on these models.
        fleet: Reports on all processes, of which this server is one front. None: there is only this process.
        base: Settings of models that operators load. None: those that the first model would hand on.

    Raises:
        ConfigError: A TLS file is missing or wrong.
    """

    def __init__(
        self,
        config: ServerConfig,
        models: Sequence[EngineConfig],
        *,
        owns_process: bool = False,
        open_engines: OpenEngines = open_engines,
        pipelines: Sequence[PipelineFile] = (),
        fleet: Fleet | None = None,
        base: EngineConfig | None = None,
    ) -> None:
        self._fleet = fleet
        self._pipelines = pipelines
        self.registry = EngineRegistry()
        self.memory = governor_for(models[0])
        self.state = ServerState(self.memory, config.max_connections)
        self._admin: ModelAdmin | None = None
        if config.admin_api_keys:
            self._admin = ModelAdmin(self.registry, base or base_of(models[0]), self.memory, config.models_memory_bytes)
        self._config = config
        self._tls = server_context(config)
        self._models = models
        self._drain_timeout_s = max(model.drain_timeout_s for model in models)
        self._owns_process = owns_process
        self._open_engines = open_engines
        self._stop_http = anyio.Event()
        self._opening, self._serving = anyio.CancelScope(), anyio.CancelScope()
        self._is_open = False
        self._failure: BaseException | None = None
        self._batches: Batches | None = None
        self._tracer: Tracer | None = None
        self._application: Application | None = None
        self._is_closing = False
        self._lead_over = anyio.Event()

    async def run(self, listener: socket.socket, quic_listener: socket.socket | None = None) -> None:
        """Serve until `close()` is called or an engine fails. Cancellation drops the requests in flight.

        Args:
            listener: See `serve`.
            quic_listener: See `serve`.

        Raises:
            ConfigError: A model cannot be loaded as configured.
            DeviceLost: An engine failed while it served.
        """
        log.info("server.listening", url=url(listener, tls=self._tls is not None))
        file = SocketFile(listener)
        try:
            with single_errors():
                async with (
                    traces_of(self._config) as self._tracer,
                    batches_of(self._config, self.registry) as self._batches,
                ):
                    await self._run(listener, quic_listener)
        finally:
            if self._fleet is None:  # otherwise other fronts may still listen
                file.remove()
            for each in (listener, quic_listener):
                if each is not None:
                    each.close()  # it is open still if nothing was served
        if self._failure is not None:
            raise self._failure
        if not self._is_closing:  # by a cancellation that no scope has asked for, which a task group keeps to itself
            raise RuntimeError("the server has ended, and nobody has asked for that")
        log.info("server.stopped")

    async def _run(self, listener: socket.socket, quic_listener: socket.socket | None) -> None:
        async with anyio.create_task_group() as background:
            background.start_soon(self.state.watch)
            background.start_soon(self.memory.watch)
            if self._owns_process:
                background.start_soon(self._handle_signals)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._run_engine)
                tasks.start_soon(self._run_http, listener, quic_listener)
            background.cancel_scope.cancel()

    def http_statistics(self) -> HttpStatistics | None:
        """Return a snapshot of the HTTP side; None before it runs."""
        return None if self._application is None else self._application.http_statistics()

    async def close(self) -> None:
        """Reject new requests after the lead, finish those in flight, and make `run()` return.

        A second call ends the lead.
        """
        if self._is_closing:
            self._lead_over.set()
        self._is_closing = True
        if self._batches is not None:
            self._batches.runner.stop()
        if self._admin is not None:
            self._admin.stop()
        if not self._is_open:
            # No request is in flight, and the first load cannot be interrupted: there is no work to wait for.
            self.registry.close(DRAINING)
            self._end_process_after(GRACE_S, exit_code=0)
        else:
            longest_s = self._config.drain_lead_s + self._drain_timeout_s + GRACE_S + OVERDUE_S
            self._end_process_after(longest_s, exit_code=EXIT_OVERDUE)
            await self._lead()
            self.registry.close(DRAINING)
            began_at = anyio.current_time()
            async with anyio.create_task_group() as draining:  # before the engines that they use
                for pipeline in self.registry.pipelines.values():
                    draining.start_soon(pipeline.drain, self._drain_timeout_s)
            left_s = max(0.0, self._drain_timeout_s - (anyio.current_time() - began_at))
            async with anyio.create_task_group() as draining:
                for engine in (*self.registry.engines, *(() if self._admin is None else self._admin.leaving)):
                    draining.start_soon(engine.drain, left_s)
        self._stop_http.set()

    async def _lead(self) -> None:
        """Answer requests while gateways read in `/ready` that the server is about to drain.

        In the second half, when gateways have read it, each answer closes its connection. A client that still has one
        would lose a request that crosses the end of the connection.
        """
        self.registry.announce_close(DRAINING)
        for closes in (False, True):
            self.registry.closes_connections = closes
            with anyio.move_on_after(self._config.drain_lead_s / 2):
                await self._lead_over.wait()

    async def _run_engine(self) -> None:
        try:
            await anyio.to_thread.run_sync(self.memory.measure)
            with self._opening:
                await run_guarded(self._serve_engines)
        except Exception as error:  # noqa: BLE001  # run() raises it after HTTP has shut down in order
            self._fail(only_error(error))

    async def _serve_engines(self) -> None:
        async with self.registry.loading(self._open_engines(self._models, self.memory)) as engines:
            if self._owns_process:
                tune_garbage_collector()
                await anyio.to_thread.run_sync(release_memory_of_loading)
            self._is_open = True
            self.registry.open(*engines.values(), pipelines=built_on(engines, self._pipelines))
            if self._batches is not None:
                self._batches.runner.start()
            if self._fleet is not None:
                self._fleet.ready()
            for name, engine in engines.items():
                log.info("server.ready", model=name, **engine.card.summary)
            with self._serving:
                async with anyio.create_task_group() as watching:
                    for engine in engines.values():
                        watching.start_soon(self._watch, engine)
                    if self._admin is not None and isinstance(engines, EngineGroup):
                        self._admin.users += users_of(self.registry, self._batches)
                        watching.start_soon(self._admin.run, engines, self._watch)

    async def _watch(self, engine: Engine) -> None:
        if reason := await engine.wait_broken():
            self._fail(DeviceLost(reason))

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self.registry.close(self._public_reason(error))
        self._lead_over.set()
        self._end_process_after(GRACE_S + OVERDUE_S, exit_code=EXIT_OVERDUE)
        self._stop_http.set()

    def _public_reason(self, error: BaseException) -> str:
        """Return the reason of a failure for clients; the text of a load error may name folders."""
        if isinstance(error, DeviceLost):
            return str(error)
        return "the server failed" if self.registry.engines else "the models could not be loaded"

    async def _run_http(self, listener: socket.socket, quic_listener: socket.socket | None) -> None:
        application = self._application = Application(
            self.registry,
            self.state,
            self._config,
            [pipeline.name for pipeline in self._pipelines],
            batches=self._batches,
            fleet=self._fleet,
            admin=self._admin,
            tracer=self._tracer,
        )
        config = self._hypercorn_config()
        fast_path = FastPath(application, lambda: config.response_headers("h11"))
        app = GeneralPath.before(application, self._config.cors_origins)
        async with anyio.create_task_group() as quic:
            if quic_listener is not None:
                config.alt_svc_headers = [f'h3=":{quic_listener.getsockname()[1]}"; ma=3600']
                quic.start_soon(Http3(app, self._config, self.state).run, quic_listener)
            acceptor = Acceptor(app, fast_path, config, self._tls)
            accepting = None if self._fleet is None else self._fleet.accepting
            await acceptor.run(listener, self._stop_http.wait, self._drain_timeout_s + GRACE_S, accepting)
            await self._until_quiet()
            quic.cancel_scope.cancel()
        if self._admin is not None and self._admin.is_loading:
            self._end_process_after(GRACE_S, exit_code=0)  # nothing is in flight, and loading cannot be interrupted
        (self._serving if self._is_open else self._opening).cancel()

    async def _until_quiet(self) -> None:
        """Wait for the HTTP/3 connections, the only ones left."""
        with anyio.move_on_after(GRACE_S):
            while self.state.connections:
                await self.state.changed()

    def _hypercorn_config(self) -> ConnectionConfig:
        config = ConnectionConfig()
        config.limits = self._config
        config.server_state = self.state
        config.logger_class = HypercornLog
        config.keep_alive_max_requests = 2**31  # Hypercorn's limit would close an HTTP/2 connection with open streams
        config.h2_max_concurrent_streams = 100
        config.include_server_header = False
        return config

    async def _handle_signals(self) -> None:
        write_stacks_on_signals()
        async with anyio.create_task_group() as closing:
            with end_signals() as signals:
                async for number in signals:
                    log.info("server.stopping", signal=number.name)
                    if self._is_closing or self.registry.leaving:
                        os._exit(128 + number)
                    closing.start_soon(self.close)

    def _end_process_after(self, seconds: float, *, exit_code: int) -> None:
        """End the process by force after `seconds` in which it runs. A thread does it: the event loop may hang."""
        if self._owns_process:
            call_awake_after(seconds, partial(_end_process, exit_code))


def _end_process(exit_code: int) -> None:
    log.warning("server.ended", exit_code=exit_code)
    os._exit(exit_code)
