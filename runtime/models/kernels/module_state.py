"""Snapshot of a model's state, to find and undo changes by forwards.

A forward should change nothing. Some models keep the longest length so far, or switch to another kind of attention at
the first short text. Their results then depend on earlier texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

_PLAIN: Final = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
"""Immutable values, which are compared by `==`."""

_KEPT_BY_TORCH: Final = frozenset(vars(nn.Module()))
"""Attributes of every module: its weights, submodules and hooks."""


class ModuleState:
    """Snapshot of everything that a model holds beside its weights.

    Args:
        model: The model. Forwards may change its buffers, attributes and submodules.
    """

    def __init__(self, model: nn.Module) -> None:
        self._weights = [*model.parameters()]
        self._versions = [weight._version for weight in self._weights]
        self._held = [
            (module, [{name: _Value(value) for name, value in place.items()} for place in _places(module)])
            for module in model.modules()
        ]

    def changes(self) -> list[str]:
        """Return the names of changed attributes, such as `BigBirdModel.attention_type`."""
        found = dict[str, None]()
        for module, held in self._held:
            for before, now in zip(held, _places(module), strict=True):
                for name in before.keys() | now.keys():
                    if name not in before or name not in now or not before[name].equals(now[name]):
                        found[f"{type(module).__name__}.{name}"] = None
        return sorted(found)

    def weights_changed(self) -> bool:
        """True: weights were written to. `restore` does not bring those back."""
        return [weight._version for weight in self._weights] != self._versions

    def restore(self) -> None:
        """Restore the snapshot. No forward may be running."""
        for module, held in self._held:
            for before, now in zip(held, _places(module), strict=True):
                for name in now.keys() - before.keys():
                    del now[name]
                now.update({name: value.restored() for name, value in before.items()})


class _Value:
    """A value, and a copy of it to restore."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._copy: Any = value
        if isinstance(value, Tensor):
            self._copy = value.detach().clone()
        elif isinstance(value, list | dict | set):
            self._copy = value.copy()

    def equals(self, now: Any) -> bool:
        if isinstance(self._copy, Tensor):
            return isinstance(now, Tensor) and _same(self._copy, now)
        if isinstance(now, Tensor):
            return False
        if isinstance(self._copy, _PLAIN):
            return type(now) is type(self._copy) and bool(now == self._copy)
        if isinstance(self._copy, list | dict | set | tuple):
            return type(now) is type(self._copy) and _same_members(self._copy, now)
        return now is self.value

    def restored(self) -> Any:
        if isinstance(self._copy, Tensor):
            if not _same(self._copy, self.value):
                self.value.copy_(self._copy)
        elif isinstance(self._copy, list | dict | set) and not _same_members(self._copy, self.value):
            self.value.clear()
            self.value.extend(self._copy) if isinstance(self.value, list) else self.value.update(self._copy)
        return self.value


def _places(module: nn.Module) -> tuple[dict[str, Any], ...]:
    """Return the dicts that hold a module's buffers, its submodules, and its other attributes."""
    return module._buffers, module._modules, _Attributes(module)


class _Attributes(dict[str, Any]):
    """The attributes that one module has beyond those of every module. Writes go through to the module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__({name: value for name, value in vars(module).items() if name not in _KEPT_BY_TORCH})
        self._vars = vars(module)

    def __delitem__(self, name: str) -> None:
        del self._vars[name]

    def update(self, values: Mapping[str, Any]) -> None:  # type: ignore[override]
        self._vars.update(values)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other.to(one.device))


def _same_members(one: Any, other: Any) -> bool:
    if len(one) != len(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same_member(one[name], other[name]) for name in one)
    if isinstance(one, set):
        return bool(one == other)
    return all(_same_member(a, b) for a, b in zip(one, other, strict=True))


def _same_member(one: Any, other: Any) -> bool:
    if one is other:
        return True
    return isinstance(one, _PLAIN) and type(one) is type(other) and bool(one == other)
