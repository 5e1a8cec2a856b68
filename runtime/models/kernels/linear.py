"""Linear layers whose weights are laid out for the processor once, at load, instead of in every call.

On the CPU `F.linear` gives float32 to MKL, and has oneDNN bring bfloat16 weights into its own blocked layout each time.
With the weights brought there beforehand, oneDNN multiplies float32 about twice as fast, and a single short text in
bfloat16 a third faster. The results differ from those of `nn.Linear` by rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from staged_pool.stages.log import get_logger

log = get_logger("staged_pool.models")

NO_KERNEL: Final = (RuntimeError, AttributeError)
"""Raised where a kernel is missing: by torch for a processor or a build, by Python for an operator without a name."""

Product = Literal["fused", "plain"]
"""A way to multiply. `fused`: oneDNN's, of weights in its own layout, with activations and sums in it. `plain`: that of
the BLAS library that torch was built with, of weights as [in, out]."""


class PrepackedLinear(nn.Module):
    """y = x W^T + b, as an `nn.Linear` that it takes the place of.

    Args:
        weight: [out, in], on the CPU, float32 or bfloat16. It is not kept.
        bias: [out].
    """

    weight: Tensor
    """As `prepacked` has it."""

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
    """[out, in], on the CPU, float32 or bfloat16 -> the same in oneDNN's own layout: opaque, and of no use to others.

    Args:
        weight: The matrix.
        ops: The operators of this build of torch.

    Raises:
        NO_KERNEL: This build of torch, or this processor, does not have the kernels.
    """
    packed: Tensor = ops.mkldnn._reorder_linear_weight(weight.detach())
    return packed


def laid_out(weight: Tensor, product: Product) -> Tensor:
    """[out, in] -> the same matrix in the layout that a way to multiply takes.

    Raises:
        NO_KERNEL: This build of torch, or this processor, does not have the kernels.
    """
    return prepacked(weight) if product == "fused" else weight.detach().t().contiguous()


def usual_product(dtype: torch.dtype, able: str = torch.backends.cpu.get_cpu_capability()) -> Product:
    """Return the quicker way to multiply on this processor, by a table; for all numbers of tokens.

    With AVX-512, oneDNN applies an activation, or adds, while it writes a product, which costs next to nothing. With
    AVX2 either costs more than another pass over the values. perf/NOTES.md has the times.

    Args:
        dtype: Of the weights.
        able: What vectors the processor has, and torch uses, in torch's words.
    """
    return "fused" if able.startswith("AVX512") and has_prepacked(dtype) else "plain"


def has_prepacked(dtype: torch.dtype, ops: Any = torch.ops) -> bool:
    """Try oneDNN's products: False where this build of torch, or this processor, does not have them.

    Args:
        dtype: Of the weights.
        ops: The operators of this build of torch.
    """
    x = torch.zeros(8, 8, dtype=dtype)
    try:
        weight = prepacked(x, ops)
        ops.mkldnn._linear_pointwise.default(x, weight, None, "gelu", [], "none")
        ops.mkldnn._linear_pointwise.binary(x, x, weight, None, "add")
    except NO_KERNEL as error:
        log.info("model.no_prepacked", dtype=str(dtype), reason=str(error))
        return False
    return True


def prepack_linears(model: nn.Module) -> Callable[[], None]:
    """Put a `PrepackedLinear` in the place of every `nn.Linear` of a model that runs on the CPU.

    Returns:
        Puts the original layers back.

    Raises:
        NO_KERNEL: This build of torch, or this processor, does not have the kernels.
    """
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear  # a subclass may compute something else
    ]
    layers = [PrepackedLinear(linear.weight, linear.bias) for _, _, linear in places]
    for (parent, name, _), layer in zip(places, layers, strict=True):
        setattr(parent, name, layer)

    def restore() -> None:
        for parent, name, linear in places:
            setattr(parent, name, linear)

    return restore
