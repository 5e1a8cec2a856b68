"""Linear layers with prepacked weights: brought into oneDNN's layout once, at load.

On the CPU, `F.linear` gives float32 to MKL, and oneDNN brings bfloat16 weights into its blocked layout in each call.
Prepacked weights save that. The results differ from those of `nn.Linear` by rounding. perf/NOTES.md has the times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from staged_pool.stages.log import get_logger

log = get_logger("staged_pool.models")

NO_KERNEL: Final = (RuntimeError, AttributeError)
"""Errors of a missing kernel: torch raises the first, and an operator that a build lacks the second."""

Product = Literal["fused", "plain"]
"""A kernel for matrix products of floating-point numbers.

- `fused`: oneDNN, with weights in its own layout. It applies activations and sums while it writes the product.
- `plain`: the BLAS library that torch was built with, with weights as [in, out].
"""


class PrepackedLinear(nn.Module):
    """y = x W^T + b, like the `nn.Linear` that it replaces.

    Args:
        weight: [out, in], on the CPU, float32 or bfloat16. The layer keeps a prepacked copy only.
        bias: [out].
    """

    weight: Tensor
    """The result of `prepacked`."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = prepacked(weight)
        self.bias: Tensor | None = bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], in the dtype of the weights."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")
        return y


def prepacked(weight: Tensor, ops: Any = torch.ops) -> Tensor:
    """Return a matrix in oneDNN's own layout, which only oneDNN can read.

    Args:
        weight: [out, in], on the CPU, float32 or bfloat16.
        ops: The operators of this build of torch.

    Raises:
        NO_KERNEL: This build of torch or this processor lacks the kernels.
    """
    packed: Tensor = ops.mkldnn._reorder_linear_weight(weight.detach())
    return packed


def in_layout(weight: Tensor, product: Product) -> Tensor:
    """Return a matrix, [out, in], in the layout of a product.

    Raises:
        NO_KERNEL: This build of torch or this processor lacks the kernels.
    """
    return prepacked(weight) if product == "fused" else weight.detach().t().contiguous()


def default_product(dtype: torch.dtype, capability: str = torch.backends.cpu.get_cpu_capability()) -> Product:
    """Return the faster product for this processor, for any number of tokens.

    With AVX-512, an activation or a sum fused into oneDNN's product costs almost nothing. With AVX2 it costs more than
    another pass over the values. perf/NOTES.md has the times.

    Args:
        dtype: Data type of the weights.
        capability: The processor's vector extension that torch uses, by torch's name.
    """
    return "fused" if capability.startswith("AVX512") and has_prepacked(dtype) else "plain"


def has_prepacked(dtype: torch.dtype, ops: Any = torch.ops) -> bool:
    """Try oneDNN's products. False: this build of torch or this processor lacks them.

    Args:
        dtype: Data type of the weights.
        ops: The operators of this build of torch.
    """
    x = torch.zeros(8, 8, dtype=dtype)
    try:
        weight = prepacked(x, ops)
        ops.mkldnn._linear_pointwise.default(x, weight, None, "gelu", [], "none")
        ops.mkldnn._linear_pointwise.binary(x, x, weight, None, "add")
    except NO_KERNEL as error:
        log.debug("model.no_prepacked", dtype=str(dtype), reason=str(error))
        return False
    return True


def prepack_linears(model: nn.Module) -> Callable[[], None]:
    """Replace every `nn.Linear` of a model on the CPU with a `PrepackedLinear`.

    Returns:
        A function that puts the original layers back.

    Raises:
        NO_KERNEL: This build of torch or this processor lacks the kernels.
    """
    return replace_linears(model, lambda linear: PrepackedLinear(linear.weight, linear.bias))


def replace_linears(model: nn.Module, replacement: Callable[[nn.Linear], nn.Module]) -> Callable[[], None]:
    """Replace every `nn.Linear` of a model.

    Args:
        model: The model.
        replacement: Makes the new layer; all are made before the first is put in place.

    Returns:
        A function that puts the original layers back.
    """
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear  # a subclass may compute something else
    ]
    layers = [replacement(linear) for _, _, linear in places]
    for (parent, name, _), layer in zip(places, layers, strict=True):
        setattr(parent, name, layer)

    def restore() -> None:
        for parent, name, linear in places:
            setattr(parent, name, linear)

    return restore
