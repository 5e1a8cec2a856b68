"""Stages of an engine that computes in this process."""

from __future__ import annotations

from typing import Any

from staged_pool.runtime.card import Lane
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.payloads import ModelRow
from staged_pool.stages.batch import BatchStage


def batch_stages(engine: Engine) -> dict[Lane, BatchStage[Any, ModelRow]]:
    """Return the batch stage of each lane."""
    return {lane: stage for lane, stage in engine._stages.batch.items() if isinstance(stage, BatchStage)}
