"""Patch embedding as a matrix product instead of a convolution.

A model that cuts images into patches runs a convolution whose kernel and stride are one patch. That is a product of two
matrices. On a CPU, torch's convolution of patches is several times slower than the product in float32, and tens of
times in bfloat16 (perf/NOTES.md).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class PatchLinear(nn.Module):
    """Computes a convolution whose stride equals its kernel size as one linear layer.

    Args:
        convolution: Without padding, dilation or groups, and with a stride equal to its kernel. Its weight is shared.
    """

    def __init__(self, convolution: nn.Conv2d | nn.Conv3d) -> None:
        super().__init__()
        weight = convolution.weight
        # On the meta device, without memory: the convolution's weight is set below.
        self.linear = nn.Linear(weight[0].numel(), len(weight), bias=convolution.bias is not None, device="meta")
        self.linear.weight = nn.Parameter(weight.detach().flatten(1), requires_grad=False)
        if convolution.bias is not None:
            self.linear.bias = nn.Parameter(convolution.bias.detach(), requires_grad=False)
        self._kernel = tuple(weight.shape[1:])

    @property
    def weight(self) -> Tensor:
        """The matrix, [out, in]. transformers reads its dtype."""
        weight: Tensor = self.linear.weight
        return weight

    def forward(self, pixels: Tensor) -> Tensor:
        """[inputs, channels, *edges] -> [inputs, out, *edges in patches]. An incomplete patch at an end is dropped.

        Raises:
            ValueError: The pixels differ from the kernel in their channels or in their number of edges.
        """
        channels, *edges = self._kernel
        inputs, given, *lengths = pixels.shape
        if given != channels or len(lengths) != len(edges):
            raise ValueError(f"the pixels have the shape {tuple(pixels.shape)}, the kernel has {self._kernel}")
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
    """Replace each convolution of a model that is a patch embedding with a `PatchLinear`.

    Returns:
        A function that puts the original layers back.
    """
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Conv2d | nn.Conv3d) and _is_patch_embedding(child)
    ]
    for parent, name, convolution in places:
        setattr(parent, name, PatchLinear(convolution))

    def restore() -> None:
        for parent, name, convolution in places:
            setattr(parent, name, convolution)

    return restore


def _is_patch_embedding(convolution: nn.Conv2d | nn.Conv3d) -> bool:
    """True: each value is in exactly one patch, and each patch is multiplied as a whole."""
    if type(convolution) not in (nn.Conv2d, nn.Conv3d):
        return False  # a subclass may compute something else
    plain = set(convolution.padding) == {0} or convolution.padding == "valid"
    return (
        plain
        and set(convolution.dilation) == {1}
        and convolution.groups == 1
        and convolution.stride == convolution.kernel_size
    )
