"""Ranges of the inputs of linear layers, recorded while a model runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, eq=False)
class InputRange:
    """The least and the greatest input of a linear layer, channel by channel."""

    least: Tensor
    """[in], float32."""
    greatest: Tensor
    """[in], float32."""

    def times(self, factor: float) -> InputRange:
        """Return the range of inputs that are multiplied by a positive factor."""
        return InputRange(self.least * factor, self.greatest * factor)


def record_ranges(linears: Sequence[nn.Linear], run: Callable[[], None]) -> Mapping[nn.Linear, InputRange]:
    """Record the inputs of linear layers during a run. Layers that do not run have no range.

    Args:
        linears: The layers.
        run: Runs the model on typical inputs.
    """
    ranges: dict[nn.Linear, InputRange] = {}

    def record(linear: nn.Linear, module: nn.Module, given: tuple[Tensor, ...]) -> None:
        inputs = given[0].reshape(-1, linear.in_features).float()
        least, greatest = inputs.amin(dim=0), inputs.amax(dim=0)
        if linear in ranges:
            least = torch.minimum(least, ranges[linear].least)
            greatest = torch.maximum(greatest, ranges[linear].greatest)
        ranges[linear] = InputRange(least, greatest)

    with ExitStack() as hooks:
        for linear in linears:
            hooks.callback(linear.register_forward_pre_hook(partial(record, linear)).remove)
        run()
    return ranges
