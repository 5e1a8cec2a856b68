"""Linear layers in int8, with ranges of inputs that are known before.

An output is the sum over inputs of x_i w_i. Both factors are rounded to integers, which the processor multiplies and
sums exactly: so the result for one text does not depend on the others in its batch.

- Inputs: 256 integers for the range of the whole layer, from its least to its greatest input.
- Weights: integers of -127 to 127 for each output, in steps of its largest weight / 127.
- A few channels of transformers have far larger inputs than the others, which would all be rounded to a few integers.
  So each input is first divided by a number s_i, and its weights are multiplied by it. It is SmoothQuant's
  s_i = max|x_i|^a / max|w_i|^(1 - a), with a = 0.8 (Xiao and others, 2023, equation 4). docs/int8.md has the gain.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from staged_pool.runtime.models.kernels.encoder_layers import Int8, Matrix, linear
from staged_pool.runtime.models.kernels.linear import NO_KERNEL
from staged_pool.runtime.models.quantizing.ranges import InputRange

_SMOOTHING: Final = 0.8
"""Share of the differences between channels that goes into the weights: of 0.5, 0.8 and 0.9 it agreed best."""

_LEAST: Final = 1e-5
"""Lower bound of ranges and weights: a channel of zeros would be divided by 0."""

_FEATURES: Final = ("avx512_vnni", "avx_vnni", "amx_int8")
"""Any of these multiplies bytes and sums the products exactly. Older instructions cut large sums off."""


class Int8Linear(nn.Module):
    """A linear layer in int8: [..., in] -> [..., out], float32.

    Args:
        weight: See `to_int8`.
        bias: See `to_int8`.
        inputs: See `to_int8`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, inputs: InputRange) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._matrix = to_int8(weight, bias, inputs)

    @property
    def weight(self) -> Tensor:
        """The integers, in oneDNN's layout: some models look at the data type."""
        return self._matrix.weight

    def forward(self, x: Tensor) -> Tensor:
        y = linear(x.reshape(-1, self.in_features), self._matrix, "int8")
        return y.view(*x.shape[:-1], self.out_features)


def why_no_int8(able: Mapping[str, Any], ops: Any = torch.ops) -> str | None:
    """Return why matrices do not run in int8 here. None: they do.

    Args:
        able: Features of the processor; see `torch.cpu.get_capabilities`.
        ops: Operators of this build of torch.
    """
    if not any(able.get(feature) for feature in _FEATURES):
        return "this processor has no instruction for exact products of 8-bit integers, such as AVX-VNNI"
    try:
        weight = ops.onednn.qlinear_prepack(torch.zeros(8, 8, dtype=torch.int8), None)
        ones, zeros = torch.ones(8), torch.zeros(8, dtype=torch.int64)
        given = torch.zeros(8, 8, dtype=torch.uint8)
        ops.onednn.qlinear_pointwise.default(
            given, 1.0, 0, weight, ones, zeros, None, 1.0, 0, torch.float32, "gelu", [], "none"
        )
    except NO_KERNEL as error:
        return f"this build of torch has no kernel for them: {error}"
    return None


def to_int8(weight: Tensor, bias: Tensor | None, inputs: InputRange) -> Matrix:
    """Round the weights of a linear layer to int8, and lay them out for oneDNN.

    Args:
        weight: [out, in], float32, on the CPU.
        bias: [out].
        inputs: Range of the layer's inputs. Inputs beyond it are cut to it.
    """
    weight = weight.detach()
    largest = torch.maximum(inputs.least.abs(), inputs.greatest.abs()).clamp_min(_LEAST)
    smoothing = largest**_SMOOTHING / weight.abs().amax(dim=0).clamp_min(_LEAST) ** (1 - _SMOOTHING)
    least = min(0.0, float((inputs.least / smoothing).min()))
    greatest = max(0.0, float((inputs.greatest / smoothing).max()))
    step = max(greatest - least, _LEAST) / 255
    smoothed = weight * smoothing
    weight_steps = smoothed.abs().amax(dim=1).clamp_min(_LEAST) / 127
    integers = (smoothed / weight_steps.unsqueeze(1)).round().clamp(-127, 127).to(torch.int8)
    return Matrix(
        weight=torch.ops.onednn.qlinear_prepack(integers, None),
        bias=bias,
        int8=Int8(
            per_input=1 / (smoothing * step),
            step=step,
            zero=round(-least / step),
            weight_steps=weight_steps,
            weight_zeros=torch.zeros(len(weight), dtype=torch.int64),
        ),
    )
