"""Heads that are linear layers of the checkpoint, with ReLU between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # which names these heads among all others
    from staged_pool.runtime.models.specs.model import Projection


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersScoreSpec:
    """A score from the last token's vector by linear layers, with ReLU between them."""

    layers: tuple[Projection, ...]
    """The layers; the last one gives one value."""
    offset: float
    """Number that is added to the score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLabelsSpec:
    """One logit per label and step, from the vector of the tag behind the step."""

    layers: tuple[Projection, ...]
    """The layers; the last one gives a value for each label."""
    tag: str
    """Token behind each step."""
