"""The process of a replica: its environment, its logs, and settings within what Ray has assigned."""

from __future__ import annotations

import sys
from dataclasses import replace

import ray
from ray import serve

from staged_pool.api.commands import logs
from staged_pool.api.commands.process import SWITCH_INTERVAL_S, prepare_environment
from staged_pool.ray.options import within
from staged_pool.ray.settings import Settings


def begin(settings: Settings) -> Settings:
    """Prepare the process of a replica, and return its settings within what Ray has assigned."""
    prepare_environment(offline=any(model.offline for model in settings.models))
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    replica = serve.get_replica_context().replica_id
    name = f"{replica.deployment_id.name}-{replica.unique_id}"
    logs.configure(settings.process.log_level, settings.process.log_format, process=name)
    assigned = ray.get_runtime_context().get_assigned_resources()
    return replace(settings, models=[within(assigned, model) for model in settings.models])
