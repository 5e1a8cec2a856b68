"""Published models as tiny folders in the layout of each: equal to an oracle, or rejected.

Most are of 2024 to 2026.

A layout is the set of files and settings of a repository: names of classes, modules, prompts, poolings and weights.
`LAYOUTS` has one for each repository, by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from staged_pool.runtime.models.encoder import Encoder
from tests.models.tiny.bodies import Body

Check = Callable[[Path, Encoder], None]
"""A comparison of a loaded folder with its oracle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A layout and its outcome."""

    make: Body
    """Writes the folder, which is there and empty."""
    equal: Check | None = None
    """Compares its results. None: the folder is rejected."""
    cause: tuple[str, ...] = ()
    """Texts of the error, which name the cause and the way out."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    needs: str | None = None
    """First version of transformers that can make it. None: every supported one."""


def served(make: Body, equal: Check, *, needs: str | None = None, **settings: Any) -> Layout:
    """A layout that gives the results of its oracle, with these settings."""
    return Layout(make=make, equal=equal, settings=settings, needs=needs)


def rejected(make: Body, *cause: str, needs: str | None = None, **settings: Any) -> Layout:
    """A layout that is rejected with these texts in the message."""
    return Layout(make=make, cause=cause, settings=settings, needs=needs)
