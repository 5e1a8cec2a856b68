"""Users of models beside requests: pipelines, and batches that have not ended."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from staged_pool.api.app.batch_service import Batches
from staged_pool.api.app.engine_registry import EngineRegistry
from staged_pool.api.app.model_admin import Users
from staged_pool.api.app.tasks import TASKS
from staged_pool.runtime.engine.engine import Engine


def users_of(registry: EngineRegistry, batches: Batches | None) -> Sequence[Users]:
    """Return the functions that find what needs an engine.

    Args:
        registry: Has the pipelines.
        batches: Files and batches of the server. None: it has none.
    """
    found: list[Users] = [partial(_pipeline_on, registry)]
    if batches is not None:
        found.append(partial(_batch_on, batches))
    return found


def _pipeline_on(registry: EngineRegistry, engine: Engine) -> str | None:
    names = {engine.card.name, engine.config.model}
    for pipeline in registry.pipelines.values():
        if any(stage.engine is engine or stage.engine in names for stage in pipeline.stages):
            return f"the pipeline {pipeline.name} uses it until the server ends"
    return None


def _batch_on(batches: Batches, engine: Engine) -> str | None:
    """Name a batch that may use a model: which model each of its lines names is not known before the line runs."""
    for batch in batches.store.unfinished():
        task = TASKS.get(batch.endpoint)
        if task is not None and task.has_path(engine.card):
            return f"the batch {batch.id} has not ended, and may use it; wait for it, or cancel it"
    return None
