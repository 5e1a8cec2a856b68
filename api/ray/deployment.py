"""Deployment of Ray Serve: each replica runs the server's routes on engines of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.deployment import Application

from staged_pool.api.config import ServerConfig
from staged_pool.api.http.mounted import MountedServer
from staged_pool.ray.mounted import MountedOnServe
from staged_pool.ray.options import common_options
from staged_pool.ray.process import begin
from staged_pool.ray.router import DRAIN_S, STALLED, DrainTimeRouter
from staged_pool.ray.scaling import TOKENS
from staged_pool.ray.settings import Config, Settings, read_settings
from staged_pool.ray.split import split
from staged_pool.runtime.statistics import AdmissionStatistics

NAME: Final = "staged-pool"
"""Default name of the deployment."""

REPORT_PERIOD_S: Final = 0.2
"""Seconds between two reports of a replica to the router."""

REPORT_TIMEOUT_S: Final = 1.0


@serve.ingress()
class Replica:
    """One server with its engines, which run in the actor's event loop of requests.

    Args:
        settings: Settings of the server and its models.
    """

    app: MountedServer
    """The server, which Serve's base class keeps."""

    def __init__(self, settings: Settings) -> None:
        self._settings = begin(settings)

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


def app(
    config: Config,
    *,
    server: ServerConfig | None = None,
    preparers: int | Mapping[str, Any] | None = None,
    **options: Any,
) -> Application:
    """Make an application of Ray Serve: replicas with engines of their own, behind Serve's HTTP proxy.

    With `preparers` it has the split form: these take HTTP and prepare, and the replicas with the engines compute.

    Args:
        config: An `EngineConfig` or several; or the settings of `staged-pool serve --config`: a mapping, or the path of
            the file. Environment variables are not read.
        server: Settings of HTTP, if `config` is models.
        preparers: Number of preparer replicas, or options of their deployment. None: the engines' replicas prepare.
        options: Options of `serve.deployment` for the replicas with the engines, such as `num_replicas`,
            `ray_actor_options` or `autoscaling_config`.

    Raises:
        ConfigError: A setting is wrong, or has no meaning in a replica.
        ValueError: Serve rejects an option.
    """
    settings = read_settings(config, server)
    if preparers is None:
        return deployment_of(Replica, settings, options)
    of_preparers = {"num_replicas": preparers} if isinstance(preparers, int) else dict(preparers)
    return split(settings, of_preparers, options)


def deployment_of(replica: type, settings: Settings, options: Mapping[str, Any]) -> Application:
    """Make an application of a class of replicas: `Replica`, or a subclass of it.

    Raises:
        ValueError: Serve rejects an option.
    """
    return serve.deployment(replica).options(**{**_defaults(settings), **options}).bind(settings)


def build(args: Mapping[str, Any]) -> Application:
    """Make an application for a configuration file of Ray Serve.

    Its `args` are the settings of `app`, as a mapping, and `preparers`. Options of the deployments stand in its
    `deployments`, under the name `staged-pool`; in the split form under `engine` and `preparer`.

    Raises:
        ConfigError: See `app`.
    """
    settings = dict(args)
    return app(settings, preparers=settings.pop("preparers", None))


def _defaults(settings: Settings) -> dict[str, Any]:
    """Return options that suit an engine, which admits and rejects requests itself."""
    options: dict[str, Any] = {
        **common_options(settings),
        "name": NAME,
        "max_ongoing_requests": settings.server.max_http_requests,  # fewer would wait where nobody predicts their delay
    }
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") != "1":  # HAProxy sends to the replica with the fewest connections
        options["request_router_config"] = RequestRouterConfig(
            request_router_class=DrainTimeRouter,
            request_routing_stats_period_s=REPORT_PERIOD_S,
            request_routing_stats_timeout_s=REPORT_TIMEOUT_S,
        )
    return options
