"""Findings of the checks of a device: one compared result each, right or wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from staged_pool.runtime.models.kernels.self_check import difference
from staged_pool.runtime.payloads import SparseVector, Values
from staged_pool.runtime.requests import Output

_FIRST, _LAST = 100, 200
"""Characters of a long error's text that a finding keeps: a server's error ends with its last words."""

_BY_TOKEN: Final = frozenset({Output.MULTI_VECTOR, Output.TOKEN_LABELS})
"""Outputs with a row for each token."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    model: str
    way: str
    """Data type and layout, or the part of the server that was checked."""
    subject: str
    """Output and inputs that were compared, or what was counted."""
    right: bool
    difference: float | None = None
    """Relative difference from the reference, see `difference`. None: nothing was compared."""
    bound: float | None = None
    """Largest accepted difference."""
    note: str = ""
    """Text of an error, or the reason why nothing was compared."""

    def line(self) -> str:
        """Return the finding as one line."""
        apart = "" if self.difference is None else f"difference {self.difference:.2g}"
        bound = "" if self.bound is None else f"bound {self.bound:g}"
        return ", ".join(part for part in (f"{self.model}: {self.way}", self.subject, apart, bound, self.note) if part)


def compared(model: str, way: str, subject: str, *, found: Tensor, wanted: Tensor, bound: float) -> Finding:
    """Compare results with those of the reference, both [rows, values]. NaN is wrong."""
    if found.shape != wanted.shape:
        note = f"its shape is {list(found.shape)}, and that of the reference {list(wanted.shape)}"
        return Finding(model, way, subject, right=False, bound=bound, note=note)
    apart = difference(found, wanted)
    return Finding(model, way, subject, right=apart <= bound, difference=apart, bound=bound)  # NaN is not <= bound


def failed(model: str, way: str, subject: str, error: BaseException) -> Finding:
    """Return the finding of a check that raised."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if len(text) > _FIRST + _LAST:
        text = f"{text[:_FIRST]} … {text[-_LAST:]}"
    return Finding(model, way, subject, right=False, note=text)


def guarded(check: Callable[[], Iterable[Finding]], fail: Callable[[BaseException], Finding]) -> Iterator[Finding]:
    """Yield the findings of a check, and that of its error if it raises."""
    try:
        yield from check()
    except Exception as error:  # noqa: BLE001  # models and devices may raise anything, and each error is a finding
        yield fail(error)


def as_rows(output: Output, values: Sequence[Values], vocabulary: int) -> Tensor:
    """Join one output of several inputs to one matrix, float32 [rows, values].

    Args:
        output: Kind of the values. Outputs of tokens have a row for each token, the others one for each input.
        values: Those of each input.
        vocabulary: Width of a sparse vector with all its zeros.
    """
    return torch.from_numpy(np.concatenate([_rows(output, value, vocabulary) for value in values]))


def _rows(output: Output, value: Values, vocabulary: int) -> NDArray[np.float32]:
    if isinstance(value, SparseVector):
        row = np.zeros((1, vocabulary), np.float32)
        row[0, value.indices] = value.values
        return row
    if output is Output.TOKEN_WEIGHTS:
        return value[:, None]
    return value if output in _BY_TOKEN else value[None, :]
