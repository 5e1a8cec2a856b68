"""A failing world, reduced to the few deviations that make it fail. See Zeller and Hildebrandt (2002).

It works on the JSON of a world and knows nothing of its fields. It leaves out keys and elements of lists, as a
plain world does, and brings numbers nearer to 0. A step is kept if the world still fails in the same way. It is
deterministic: the same world is always reduced in the same steps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

JSON: TypeAlias = Any
Path: TypeAlias = tuple[str | int, ...]

MOST_RUNS = 3000


def way(violation: str) -> str:
    """Return the kind of a failure: its violation without numbers and names."""
    return re.sub(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?", "#", violation).split("{", maxsplit=1)[0]


def shrunk(given: JSON, fails: Callable[[JSON], bool], *, most_runs: int = MOST_RUNS) -> JSON:
    """The smallest world found that still fails.

    Args:
        given: JSON of a world that fails.
        fails: Returns True if a JSON value is a world that fails in the same way.
        most_runs: Of `fails`.
    """
    runs = 0

    def try_one(candidate: JSON) -> bool:
        nonlocal runs
        runs += 1
        return runs <= most_runs and fails(candidate)

    while True:
        smaller = _numbers(_leave_out(given, try_one), try_one)
        if smaller == given or runs > most_runs:
            return smaller
        given = smaller


def deviations(given: JSON) -> int:
    """Count deviations from a plain world: values that are no lists or objects, and empty ones."""
    if isinstance(given, dict):
        return sum(deviations(value) for value in given.values()) if given else 1
    if isinstance(given, list):
        return sum(deviations(value) for value in given) if given else 1
    return 1


def _leave_out(given: JSON, fails: Callable[[JSON], bool]) -> JSON:
    """Leave out what can be left out, the largest parts first: halves, quarters, and so on."""
    for path in list(_containers(given, ())):
        try:
            container = _at(given, path)
        except (KeyError, IndexError, TypeError):
            continue  # it has gone with another one
        keys: Sequence[str | int] = list(container) if isinstance(container, dict) else range(len(container))
        size = len(keys)
        while size:
            start = 0
            while start < len(keys):
                gone = set(keys[start : start + size])
                candidate = _with(given, path, _without(_at(given, path), gone))
                if fails(candidate):
                    given = candidate
                    container = _at(given, path)
                    keys = list(container) if isinstance(container, dict) else range(len(container))
                else:
                    start += size
            size //= 2
    return given


def _numbers(given: JSON, fails: Callable[[JSON], bool]) -> JSON:
    """Bring each number as near to 0 as possible, and empty lists of numbers."""
    for path in list(_leaves(given, ())):
        value = _at(given, path)
        for simpler in _simpler(value):
            candidate = _with(given, path, simpler)
            if fails(candidate):
                given = candidate
                break
    return given


def _simpler(value: JSON) -> Iterator[JSON]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    seen = {value}
    whole = (0, 1, value // 4, value // 2, value - 1)
    for candidate in whole if isinstance(value, int) else (0.0, 0.001, 1.0, value / 10, value / 2, value - 0.001):
        simpler = candidate if isinstance(value, int) else round(candidate, 3)
        if simpler not in seen and 0 <= simpler < value:
            seen.add(simpler)
            yield simpler


def _containers(given: JSON, path: Path) -> Iterator[Path]:
    """Yield the paths of all lists and objects, the outer ones first."""
    level = [(path, given)]
    while level:
        following = []
        for at, value in level:
            if isinstance(value, dict | list):
                yield at
                pairs = value.items() if isinstance(value, dict) else enumerate(value)
                following += [((*at, key), each) for key, each in pairs]
        level = following


def _leaves(given: JSON, path: Path) -> Iterator[Path]:
    if isinstance(given, dict | list):
        for key, value in given.items() if isinstance(given, dict) else enumerate(given):
            yield from _leaves(value, (*path, key))
    else:
        yield path


def _at(given: Any, path: Path) -> JSON:
    for key in path:
        given = given[key]
    return given


def _with(given: JSON, path: Path, value: JSON) -> JSON:
    """The same with another value in one place; what was given is left alone."""
    if not path:
        return value
    copy: Any = dict(given) if isinstance(given, dict) else list(given)
    copy[path[0]] = _with(given[path[0]], path[1:], value)
    return copy


def _without(container: JSON, keys: set[str | int]) -> JSON:
    if isinstance(container, dict):
        return {key: value for key, value in container.items() if key not in keys}
    return [value for index, value in enumerate(container) if index not in keys]
