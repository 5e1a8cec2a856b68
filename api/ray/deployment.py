"""Deployment of Ray Serve: each replica runs the server's routes on engines of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.deployment import Application

from staged_pool.api.asgi import Message, Receive, Scope, Send
from staged_pool.api.commands import logs
from staged_pool.api.commands.process import SWITCH_INTERVAL_S, prepare_environment
from staged_pool.api.config import ServerConfig
from staged_pool.api.http.mounted import MountedServer
from staged_pool.ray.router import DRAIN_S, STALLED, DrainTimeRouter
from staged_pool.ray.scaling import TOKENS
from staged_pool.ray.settings import Config, Settings, read_settings
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.statistics import AdmissionStatistics

NAME: Final = "staged-pool"
"""Default name of the deployment."""

REPORT_PERIOD_S: Final = 0.2
"""Seconds between two reports of a replica to the router."""

REPORT_TIMEOUT_S: Final = 1.0

HEALTH_PERIOD_S: Final = 2.0
"""Seconds between two health checks. Serve replaces a replica after three failed ones in a row."""


class MountedOnServe(MountedServer):
    """The server without `X-Request-ID` of its own: Serve adds it, with the same value, to each answer."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [pair for pair in message["headers"] if pair[0] != b"x-request-id"]
                message = {**message, "headers": headers}
            await send(message)

        await super().__call__(scope, receive, send_without_id)


CLOSING_S: Final = 5.0
"""Seconds that the end of a replica may take after its last request."""


@serve.ingress()
class Replica:
    """One server with its engines, which run in the actor's event loop of requests.

    Args:
        settings: Settings of the server and its models.
    """

    app: MountedServer
    """The server, which Serve's base class keeps."""

    def __init__(self, settings: Settings) -> None:
        prepare_environment(offline=any(model.offline for model in settings.models))
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        logs.configure(settings.process.log_level, settings.process.log_format)
        assigned = ray.get_runtime_context().get_assigned_resources()
        self._settings = replace(settings, models=[within(assigned, model) for model in settings.models])

    def __serve_build_asgi_app__(self) -> MountedServer:
        """Return the server for Serve, which runs its lifespan."""
        return MountedOnServe(*self._settings.models, server=self._settings.server)

    async def check_health(self) -> None:
        """Check that all engines take requests; Serve replaces a replica that fails this three times.

        Raises:
            RuntimeError: Names the model and the reason.
        """
        for name, engine in self.app.engines.items():
            if engine.fault is not None:
                raise RuntimeError(f"{name}: {engine.fault}")

    async def record_routing_stats(self) -> dict[str, float]:
        """Return the report for `DrainTimeRouter`: the drain time of the slowest engine, tokens, and a stall."""
        admissions = self._admissions()
        return {
            DRAIN_S: max(each.drain_s for each in admissions),
            TOKENS: sum(each.tokens for each in admissions),
            STALLED: float(any(engine.stall for engine in self.app.engines.values())),
        }

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the tokens in flight, for the policy of `by_tokens`."""
        return {TOKENS: sum(each.tokens for each in self._admissions())}

    def _admissions(self) -> list[AdmissionStatistics]:
        return [engine.statistics().admission for engine in self.app.engines.values()]


def app(config: Config, *, server: ServerConfig | None = None, **options: Any) -> Application:
    """Make an application of Ray Serve: replicas with engines of their own, behind Serve's HTTP proxy.

    Args:
        config: An `EngineConfig` or several; or the settings of `staged-pool serve --config`: a mapping, or the path of
            the file. Environment variables are not read.
        server: Settings of HTTP, if `config` is models.
        options: Options of `serve.deployment`, such as `num_replicas`, `ray_actor_options` or `autoscaling_config`.

    Raises:
        ConfigError: A setting is wrong, or has no meaning in a replica.
        ValueError: Serve rejects an option.
    """
    settings = read_settings(config, server)
    return deployment_of(Replica, settings, options)


def deployment_of(replica: type, settings: Settings, options: Mapping[str, Any]) -> Application:
    """Make an application of a class of replicas: `Replica`, or a subclass of it.

    Raises:
        ValueError: Serve rejects an option.
    """
    return serve.deployment(replica).options(**{**_defaults(settings), **options}).bind(settings)


def build(args: Mapping[str, Any]) -> Application:
    """Make an application for a configuration file of Ray Serve.

    Its `args` are the settings of `app`, as a mapping. Options of the deployment stand in its `deployments`, under the
    name `staged-pool`.

    Raises:
        ConfigError: See `app`.
    """
    return app(args)


def within(assigned: Mapping[str, float], model: EngineConfig) -> EngineConfig:
    """Return the settings of a model, within the resources that Ray has assigned.

    Args:
        assigned: Amounts by resource: `CPU` in cores, and `memory` in bytes.
        model: Settings. Threads and memory that they give stay.
    """
    threads, memory_bytes = int(assigned.get("CPU", 0)), int(assigned.get("memory", 0))
    return replace(
        model,
        torch_threads=model.torch_threads or threads or None,
        memory_limit_bytes=model.memory_limit_bytes or memory_bytes or None,
    )


def _defaults(settings: Settings) -> dict[str, Any]:
    """Return options that suit an engine, which admits and rejects requests itself."""
    options: dict[str, Any] = {
        "name": NAME,
        "max_ongoing_requests": settings.server.max_http_requests,  # fewer would wait where nobody predicts their delay
        "health_check_period_s": HEALTH_PERIOD_S,
        "graceful_shutdown_timeout_s": settings.models[0].drain_timeout_s + CLOSING_S,
        "logging_config": {"enable_access_log": False},  # the server logs a line for each request
    }
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") != "1":  # HAProxy sends to the replica with the fewest connections
        options["request_router_config"] = RequestRouterConfig(
            request_router_class=DrainTimeRouter,
            request_routing_stats_period_s=REPORT_PERIOD_S,
            request_routing_stats_timeout_s=REPORT_TIMEOUT_S,
        )
    return options
