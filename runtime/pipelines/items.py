"""Items of a pipeline, on their way and as outcomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from staged_pool.runtime.payloads import SparseVector
from staged_pool.runtime.results import Usage
from staged_pool.stages.errors import StagedPoolError


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineItem:
    """An item that has passed all stages."""

    index: int
    """Index among the items of the request."""
    parts: tuple[int, ...] = ()
    """Its number among the items that each expanding stage made of one, by stage."""
    value: Any
    """Its output: the value of the last stage, or what `output` of the pipeline names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemError:
    """An item that failed in a stage with `on_error="skip"`."""

    index: int
    """Index among the items of the request."""
    parts: tuple[int, ...] = ()
    """See `PipelineItem.parts`."""
    stage: str
    """Name of the stage."""
    error: StagedPoolError


Outcome: TypeAlias = PipelineItem | ItemError
"""The outcome of an item."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineResult:
    """Outcome of a request: its items in their order, or the best first behind a stage with `top_k`."""

    items: tuple[PipelineItem, ...]
    errors: tuple[ItemError, ...]
    """Items that failed and were skipped, in their order."""
    usage: Usage
    stage_s: Mapping[str, float]
    """Longest time of an item in each stage, in seconds, its wait included."""

    @property
    def values(self) -> list[Any]:
        """The output of each item."""
        return [item.value for item in self.items]


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """Value of a stage that embeds. Outputs that were not requested are None."""

    dense: NDArray[np.float32] | None = None
    sparse: SparseVector | None = None
    multi_vector: NDArray[np.float32] | None = None
    token_weights: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled:
    """Value of a stage that classifies."""

    label: str
    """The best label."""
    score: float
    """Its score."""
    scores: Mapping[str, float]
    """Scores by label."""
