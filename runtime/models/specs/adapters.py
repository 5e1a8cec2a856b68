"""Adapters that stay beside the weights of their base model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """One adapter of a model."""

    name: str
    folder: Path | None
    """Folder with peft's files. None: it is among the weights of the model, in the order of the adapters."""
