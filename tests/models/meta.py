"""A double of a GPU that computes nothing, and a count of the host's waits.

PyTorch's `meta` tensors have shapes and no values, so whatever needs a value on the host is seen: it raises, or is
counted here. The same steps on a GPU wait there for all that the device has been asked for.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

META: Final = torch.device("meta")

_PLAIN: Final = (str, bytes, int, float, type, FunctionType, ModuleType, np.ndarray, type(None))
_OURS: Final = ("staged_pool", "transformers", "torch.nn")


def to_meta(thing: Any, seen: dict[int, Any] | None = None) -> Any:
    """Move an object to the meta device in place, with all its tensors and devices."""
    seen = {} if seen is None else seen
    if isinstance(thing, Tensor):
        return thing.to(META)
    if isinstance(thing, torch.device):
        return META
    if isinstance(thing, _PLAIN) or id(thing) in seen:
        return thing
    seen[id(thing)] = thing  # which also keeps it, and its id, alive
    if isinstance(thing, nn.Module):
        thing.to(META)
    if isinstance(thing, dict):
        thing.update({key: to_meta(value, seen) for key, value in thing.items()})
    elif isinstance(thing, list):
        thing[:] = [to_meta(value, seen) for value in thing]
    elif type(thing) is tuple:
        return tuple(to_meta(value, seen) for value in thing)
    elif isinstance(thing, MethodType):
        to_meta(thing.__self__, seen)
    elif type(thing).__module__.startswith(_OURS):
        for name in _attributes(thing):
            value = getattr(thing, name)
            if (moved := to_meta(value, seen)) is not value:
                object.__setattr__(thing, name, moved)
    return thing


def _attributes(thing: Any) -> Iterator[str]:
    slots = {name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())}
    for name in {*getattr(thing, "__dict__", ()), *slots}:
        # `Module.to` has moved weights and buffers.
        if hasattr(thing, name) and not (isinstance(thing, nn.Module) and name in {"_parameters", "_buffers"}):
            yield name


class Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what the host would wait for.

    Attributes:
        found: For each the lines of code that lead to it, innermost last.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[list[str]] = []
        self._pinned: list[Tensor] = []

    @contextmanager
    def counted(self) -> Iterator[None]:
        """A block in which waits are counted."""
        with _Made(self._note), self:
            yield

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory that copies do not wait for; see `transfer.pinned`."""
        self._pinned.append(torch.empty(shape, dtype=dtype))
        return self._pinned[-1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # in inference mode it is not made of simpler steps before
            if (found := func.decompose(*args, **kwargs)) is not NotImplemented:
                return found
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device == META:
            self._note()
            return False  # as of a mask that hides something
        if func is torch.ops.aten.copy_.default and args[0].device != args[1].device:
            self._check(args[0] if args[1].device == META else args[1])
            return args[0]
        to = kwargs.get("device")
        if func is torch.ops.aten._to_copy.default and to is not None and torch.device(to) != args[0].device:
            self._check(args[0])
            return torch.empty_like(args[0], device=to)
        return func(*args, **kwargs)

    def _check(self, host: Tensor) -> None:
        if host.device == META or all(host.data_ptr() != one.data_ptr() for one in self._pinned):
            self._note()

    def _note(self) -> None:
        lines = traceback.extract_stack()[-20:]
        self.found.append([f"{line.filename}:{line.lineno} {line.name}" for line in lines])


class _Made(TorchFunctionMode):
    """Notes tensors that are made of Python's numbers on the device: they come by a copy that is waited for."""

    def __init__(self, note: Callable[[], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        to = kwargs.get("device")
        if func in {torch.tensor, torch.as_tensor} and to is not None and torch.device(to) == META:
            self._note()
        return func(*args, **kwargs)


class NoMark:
    """Takes the place of `transfer.StreamEvent`."""

    def __init__(self, device: torch.device) -> None:
        assert device == META

    def wait(self) -> None:
        """Wait for nothing."""

    def precede(self, values: Tensor) -> None:
        """Need no order: nothing is computed."""
