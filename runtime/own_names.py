"""Attributes: a name that an object does not have cannot be set, and an error says what was meant."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, ClassVar


class OwnNames:
    """Base of classes whose users may take them for others.

    An attribute that is not theirs cannot be set: it would change nothing, and results would be others than meant.
    """

    _instead: ClassVar[Mapping[str, str]] = {}
    """Names that users may expect, each with the thing that takes its place."""

    if not TYPE_CHECKING:  # a type checker knows the attributes, and would believe in any other

        def __setattr__(self, name: str, value: object) -> None:
            if not (name.startswith("_") or _is_own(type(self), name)):
                raise AttributeError(_no_such(self, name), name=name, obj=self)
            super().__setattr__(name, value)

        def __getattr__(self, name: str) -> object:
            raise AttributeError(_no_such(self, name), name=name, obj=self)


def _is_own(kind: type, name: str) -> bool:
    return hasattr(kind, name) or any(name in vars(base).get("__annotations__", ()) for base in kind.__mro__)


def _no_such(owner: OwnNames, name: str) -> str:
    kind = type(owner)
    message = f"{kind.__name__} has no attribute {name!r}"
    if (instead := kind._instead.get(name)) is not None:  # of this module's class
        return f"{message}; instead: {instead}"
    close = get_close_matches(name, [known for known in dir(kind) if not known.startswith("_")], 1)
    return f"{message}; did you mean {close[0]!r}?" if close else message
