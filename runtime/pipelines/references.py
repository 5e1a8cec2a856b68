"""References: the names by which a stage finds its inputs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from staged_pool.stages.errors import ConfigError, InvalidInput

REQUEST: Final = "request"
"""Name of the request in a reference: `request.query` is its field `query`."""

ITEM: Final = "item"
"""Name of the item in a reference, as the caller has given it."""

NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
"""Names of stages."""

_REFERENCE: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]*(\.[A-Za-z][A-Za-z0-9_-]*)*")


@dataclass(frozen=True, slots=True)
class Reference:
    """A place to read a value from: `item`, `request.query`, the name of an earlier stage, or a field of one."""

    source: str
    """`request`, `item`, or the name of a stage."""
    path: tuple[str, ...]
    """Names of fields, from the outside to the inside."""

    def __str__(self) -> str:
        return ".".join((self.source, *self.path))

    def of(self, values: Mapping[str, object]) -> object:
        """Return the value.

        Args:
            values: The request, the item and the values of earlier stages, by name.

        Raises:
            InvalidInput: A field is missing.
        """
        value = values[self.source]
        for place, name in enumerate(self.path):
            if isinstance(value, Mapping):
                found = name in value
                value = value.get(name)
            else:
                found = hasattr(value, name)
                value = getattr(value, name, None)
            if not found:
                of = ".".join((self.source, *self.path[:place]))
                raise InvalidInput(f"`{of}` has no field `{name}`; the pipeline reads `{self}`.", param=name)
        return value


def reference(text: object, known: Mapping[str, object], where: str) -> Reference:
    """Read a reference.

    Args:
        text: Such as `request.query` or `regions.crop`.
        known: Names that it may begin with.
        where: Beginning of the error message.

    Raises:
        ConfigError: It is no reference, or begins with an unknown name.
    """
    if not isinstance(text, str) or _REFERENCE.fullmatch(text) is None:
        raise ConfigError(f"{where} = {text!r}: must be names joined by dots, such as request.query")
    source, *path = text.split(".")
    if source not in known:
        raise ConfigError(f"{where} = {text!r}: no earlier stage has this name; known here: {', '.join(known)}")
    if source == REQUEST and not path:
        raise ConfigError(f"{where} = {text!r}: must name a field of the request, such as request.query")
    return Reference(source, tuple(path))
