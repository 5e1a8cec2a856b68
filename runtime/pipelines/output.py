"""Outputs of items: a reference, or several by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from staged_pool.runtime.pipelines.moving import Moving
from staged_pool.runtime.pipelines.references import ITEM, REQUEST, reference
from staged_pool.stages.errors import ConfigError


def output_of(given: object, stages: Sequence[str]) -> Callable[[Moving], object]:
    """Return the function that makes the output of an item.

    Args:
        given: See `output` of `Pipeline`.
        stages: Names of the stages.

    Raises:
        ConfigError: It is no reference, nor several by name.
    """
    known = dict.fromkeys((ITEM, REQUEST, *stages))
    if given is None:
        given = stages[-1]
    if isinstance(given, str):
        only = reference(given, known, "output")
        return lambda item: only.of(item.values)
    if not isinstance(given, Mapping) or not given:
        raise ConfigError(f'output = {given!r}: must be a reference, or several by name, such as {{score = "rerank"}}')
    several = {str(name): reference(text, known, f"output.{name}") for name, text in given.items()}
    return lambda item: {name: each.of(item.values) for name, each in several.items()}
