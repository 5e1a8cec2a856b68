"""Patches that are multiplied as rows of a matrix instead of being convolved.

Models that get a picture cut into patches still run a convolution over each, whose kernel is as large as the patch: one
product of two matrices. torch's convolution takes six times as long for it on the CPU in float32, and over fifty times
in bfloat16 (1200 patches of Qwen2-VL on one core: 160 and 296 ms instead of 28 and 5).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class PatchLinear(nn.Module):
    """What a convolution makes of inputs of the size of its kernel.

    Args:
        convolution: Without padding, dilation or groups. Its weight is shared.
    """

    def __init__(self, convolution: nn.Conv3d) -> None:
        super().__init__()
        weight = convolution.weight
        # Without memory of its own, which the weight takes below.
        self.linear = nn.Linear(weight[0].numel(), len(weight), bias=convolution.bias is not None, device="meta")
        self.linear.weight = nn.Parameter(weight.detach().flatten(1), requires_grad=False)
        if convolution.bias is not None:
            self.linear.bias = nn.Parameter(convolution.bias.detach(), requires_grad=False)
        self._kernel = tuple(weight.shape[1:])

    @property
    def weight(self) -> Tensor:
        """Its dtype is what callers ask for."""
        weight: Tensor = self.linear.weight
        return weight

    def forward(self, patches: Tensor) -> Tensor:
        """[patches, channels, time, height, width] -> [patches, out, 1, 1, 1].

        Raises:
            ValueError: They are not of the size of the kernel.
        """
        if tuple(patches.shape[1:]) != self._kernel:
            raise ValueError(f"patches are of {tuple(patches.shape[1:])}, the kernel of {self._kernel}")
        out: Tensor = self.linear(patches.flatten(1))
        return out[:, :, None, None, None]


def flatten_patches(model: nn.Module) -> Callable[[], None]:
    """Put a `PatchLinear` in the place of each convolution of a model that may do nothing else.

    Returns:
        Puts the original layers back.
    """
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Conv3d and _covers(child)  # a subclass may compute something else
    ]
    for parent, name, convolution in places:
        setattr(parent, name, PatchLinear(convolution))

    def restore() -> None:
        for parent, name, convolution in places:
            setattr(parent, name, convolution)

    return restore


def _covers(convolution: nn.Conv3d) -> bool:
    plain = convolution.padding == (0, 0, 0) and convolution.dilation == (1, 1, 1) and convolution.groups == 1
    return plain and convolution.stride == convolution.kernel_size
