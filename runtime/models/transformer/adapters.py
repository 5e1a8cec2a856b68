"""Layers of a transformer that several adapters share: the one of the running forward changes their results.

The weights of the base model exist once. A LoRA (Hu et al., 2021, https://arxiv.org/abs/2106.09685) adds s * B A x to a
layer's result, which costs little where its rank is low.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Change(nn.Module):
    """Change of one layer by an adapter."""

    def compute(self, base: nn.Module, *given: Any) -> Tensor:
        """Compute the layer's result with the adapter.

        Args:
            base: The layer.
            given: Its arguments.
        """
        raise NotImplementedError


class LowRank(Change):
    """LoRA of a linear layer: W x + b becomes (W x + B A x) * f + b + c.

    Args:
        first: A, [rank, in].
        second: B with the factor s, [out, rank].
        factors: f, [out]: DoRA's magnitudes over the lengths of the rows of W + B A. None: 1.
        bias: c, [out]. None: 0.
    """

    def __init__(
        self, first: Tensor, second: Tensor, factors: Tensor | None = None, bias: Tensor | None = None
    ) -> None:
        super().__init__()
        self.first, self.second = _fixed(first), _fixed(second)
        self.factors = None if factors is None else _fixed(factors)
        self.bias = None if bias is None else _fixed(bias)

    def compute(self, base: nn.Module, *given: Any) -> Tensor:
        (x,) = given
        added = F.linear(F.linear(x, self.first), self.second)
        result: Tensor = base(x)
        if self.factors is None:
            result = result + added
        elif (own := getattr(base, "bias", None)) is None:
            result = (result + added) * self.factors
        else:
            result = (result - own + added) * self.factors + own
        return result if self.bias is None else result + self.bias


class LowRankEmbedding(Change):
    """LoRA of an embedding: row i becomes E_i + A_i B.

    Args:
        table: A, [rows, rank].
        second: B with the factor s, [width, rank].
    """

    def __init__(self, table: Tensor, second: Tensor) -> None:
        super().__init__()
        self.table, self.second = _fixed(table), _fixed(second)

    def compute(self, base: nn.Module, *given: Any) -> Tensor:
        (ids,) = given
        result: Tensor = base(ids) + F.linear(F.embedding(ids, self.table), self.second)
        return result


class Replacement(Change):
    """A layer of the adapter's own instead of the base model's.

    Args:
        layer: The layer.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def compute(self, base: nn.Module, *given: Any) -> Tensor:
        result: Tensor = self.layer(*given)
        return result


AdapterChanges: TypeAlias = Mapping[str, Mapping[str, Change]]
"""For each adapter, its change of each layer, by the layer's name."""


class _Selection(threading.local):
    """Adapter of the forward that the calling thread runs."""

    number: int | None = None
    """Its number. None: the base model."""


class AdaptedLayer(nn.Module):
    """A layer with the changes of some adapters. Its other attributes are those of the layer.

    Args:
        base: The layer.
        changes: By the numbers of the adapters that change it.
        selection: Adapter of the running forward.
    """

    def __init__(self, base: nn.Module, changes: Mapping[int, Change], selection: _Selection) -> None:
        super().__init__()
        self.base = base
        self.changes = nn.ModuleList(changes.values())
        self._places: Final = {number: place for place, number in enumerate(changes)}
        self._selection: Final = selection

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)

    def forward(self, *given: Any) -> Tensor:
        """Compute the layer with the adapter of the running forward."""
        number = self._selection.number
        place = None if number is None else self._places.get(number)
        if place is None:
            plain: Tensor = self.base(*given)
            return plain
        change = self.changes[place]
        assert isinstance(change, Change)
        return change.compute(self.base, *given)


class Adapters:
    """The adapters of one transformer. Thread-safe.

    Args:
        model: The transformer; its layers are replaced.
        changes: The adapters.

    Attributes:
        names: Their names.
    """

    def __init__(self, model: nn.Module, changes: AdapterChanges) -> None:
        self._numbers = {name: number for number, name in enumerate(changes)}
        self._selection = _Selection()
        layers = dict(model.named_modules())
        for path in dict.fromkeys(path for each in changes.values() for path in each):
            own = {self._numbers[name]: each[path] for name, each in changes.items() if path in each}
            parent, _, last = path.rpartition(".")
            setattr(layers[parent], last, AdaptedLayer(layers[path], own, self._selection))

    @property
    def names(self) -> Sequence[str]:
        return tuple(self._numbers)

    @contextmanager
    def use(self, name: str | None) -> Iterator[None]:
        """Open a block whose forwards use an adapter. None: the base model.

        Raises:
            ValueError: There is no such adapter.
        """
        if name is not None and name not in self._numbers:
            raise ValueError(f"there is no adapter {name!r}")
        self._selection.number = None if name is None else self._numbers[name]
        try:
            yield
        finally:
            self._selection.number = None


def _fixed(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)


def dora_factors(weight: Tensor, change: Tensor, magnitude: Tensor) -> Tensor:
    """Factors of DoRA for the rows of W + B A, [out].

    Liu et al., 2024, https://arxiv.org/abs/2402.09353.

    Args:
        weight: W, [out, in].
        change: s * B A, [out, in].
        magnitude: Saved lengths of the rows, [out].
    """
    factors: Tensor = magnitude.flatten() / torch.linalg.norm(weight + change, dim=1)
    return factors
