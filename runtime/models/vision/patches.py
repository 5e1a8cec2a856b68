"""Patches that are multiplied as rows of a matrix instead of being convolved.

Models that cut an image into patches, or get it cut, run a convolution whose kernel is as large as a patch, and whose
steps are: one product of two matrices. torch's convolution takes six times as long for patches that lie one behind the
other on the CPU in float32, and over fifty times in bfloat16 (1200 patches of Qwen2-VL on one core: 160 and 296 ms
instead of 28 and 5).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class PatchLinear(nn.Module):
    """What a convolution makes of patches as large as its kernel, which lie side by side.

    Args:
        convolution: Without padding, dilation or groups, and with steps as wide as its kernel. Its weight is shared.
    """

    def __init__(self, convolution: nn.Conv2d | nn.Conv3d) -> None:
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

    def forward(self, pixels: Tensor) -> Tensor:
        """[inputs, channels, *edges] -> [inputs, out, *edges in patches]; what is left of a patch at an end is dropped.

        Raises:
            ValueError: They do not have the channels of the kernel, or as many edges.
        """
        channels, *edges = self._kernel
        inputs, given, *lengths = pixels.shape
        if given != channels or len(lengths) != len(edges):
            raise ValueError(f"pixels are of {tuple(pixels.shape)}, the kernel of {self._kernel}")
        counts = [length // edge for length, edge in zip(lengths, edges, strict=True)]
        for at, (count, edge) in enumerate(zip(counts, edges, strict=True), 2):
            pixels = pixels.narrow(at, 0, count * edge)
        cut = pixels.reshape(inputs, channels, *(size for pair in zip(counts, edges, strict=True) for size in pair))
        # [inputs, channels, rows, height, columns, width] -> [inputs, rows, columns, channels, height, width]
        last = cut.dim()
        patches = cut.permute(0, *range(2, last, 2), 1, *range(3, last, 2)).reshape(-1, self.linear.in_features)
        out: Tensor = self.linear(patches)
        return out.view(inputs, *counts, -1).movedim(-1, 1)


def flatten_patches(model: nn.Module) -> Callable[[], None]:
    """Put a `PatchLinear` in the place of each convolution of a model that may do nothing else.

    Returns:
        Puts the original layers back.
    """
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Conv2d | nn.Conv3d) and _covers(child)
    ]
    for parent, name, convolution in places:
        setattr(parent, name, PatchLinear(convolution))

    def restore() -> None:
        for parent, name, convolution in places:
            setattr(parent, name, convolution)

    return restore


def _covers(convolution: nn.Conv2d | nn.Conv3d) -> bool:
    """Whether every value is in one patch, and every patch is multiplied whole."""
    if type(convolution) not in (nn.Conv2d, nn.Conv3d):
        return False  # a subclass may compute something else
    plain = set(convolution.padding) == {0} or convolution.padding == "valid"
    return (
        plain
        and set(convolution.dilation) == {1}
        and convolution.groups == 1
        and convolution.stride == convolution.kernel_size
    )
