"""Linear layers in a file of weights, and heads that are several of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """A linear layer stored in a separate file, or among the transformer's weights."""

    files: tuple[Path, ...]
    """Candidate files, safetensors or pickled; the first that exists is read."""
    weight: str
    """Name of the weight tensor, of shape [out, in]."""
    bias: str | None
    """Name of the bias tensor, of shape [out]. None: no bias."""


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
