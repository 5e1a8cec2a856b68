"""Errors as plain values, for another process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, get_type_hints

from staged_pool.runtime.remote.arrays import FAR_S, Amount, Packed, Seconds
from staged_pool.runtime.remote.limits import require
from staged_pool.stages import errors
from staged_pool.stages.errors import InvalidInput, StagedPoolError
from staged_pool.stages.wire import WireError


class PackedError(Packed, frozen=True):
    """An error as plain values."""

    name: str
    """Its class in `stages/errors.py`."""
    message: str
    fields: dict[str, str | Amount | Seconds | None]
    """Its further arguments, by name."""


_ERRORS: Final[Mapping[str, type[StagedPoolError]]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, StagedPoolError)
}


def _named_parameters(call: Callable[..., object]) -> Mapping[str, Any]:
    """Return the types of the arguments that a function takes by name alone."""
    hints, parameters = get_type_hints(call), inspect.signature(call).parameters.values()
    named = {each.name: hints[each.name] for each in parameters if each.kind is each.KEYWORD_ONLY}
    return {name: hint | int if isinstance(0.0, hint) else hint for name, hint in named.items()}


_ERROR_FIELDS: Final = {name: _named_parameters(kind.__init__) for name, kind in _ERRORS.items()}
"""Types of an error's arguments behind its message, by name: they are its attributes, too."""


def pack_error(error: StagedPoolError) -> PackedError:
    """Return an error as plain values. One of a plugin becomes one of the class that it is derived from."""
    name = next(base.__name__ for base in type(error).__mro__ if _ERRORS.get(base.__name__) is base)
    # Of an invalid input it is the message before its fields got the names of the engine.
    message = error._template if isinstance(error, InvalidInput) else str(error)
    return PackedError(name, message, {field: _packed(getattr(error, field)) for field in _ERROR_FIELDS[name]})


def _packed(value: Any) -> Any:
    """Return an argument of an error. A duration that was estimated is brought within those that a peer takes."""
    return min(max(value, 0.0), FAR_S) if isinstance(value, float) else value


def unpack_error(packed: PackedError) -> StagedPoolError:
    """Return the error of `pack_error`.

    Raises:
        WireError: No error class has this name, or it has other arguments, or they have other types.
    """
    if (kind := _ERRORS.get(packed.name)) is None:
        raise WireError(f"the peer sends an error of the unknown class {packed.name}")
    if packed.fields.keys() != _ERROR_FIELDS[packed.name].keys():
        raise WireError(f"the peer sends an error of {packed.name} with the arguments {sorted(packed.fields)}")
    for field, value in packed.fields.items():
        is_right = isinstance(value, _ERROR_FIELDS[packed.name][field])
        require(is_right, f"error.{field}", f"is a {type(value).__name__} in {packed.name}")
    return kind(packed.message, **packed.fields)
