"""Fused encoder layers: a few kernels each, instead of a hundred calls of modules.

Queries, keys and values are one matrix product. On processors with AVX-512, oneDNN also applies the activation, or adds
the residual, before it writes the product. Otherwise the activation reads and writes the widest values of a layer once
more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from transformers import activations
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from staged_pool.runtime.models.kernels.attention import PACKED
from staged_pool.runtime.models.kernels.encoder_layers import (
    Group,
    Layer,
    Matrix,
    begin_layer,
    finish_layer,
    layers_as_one_call,
)
from staged_pool.runtime.models.kernels.linear import Product, default_product, in_layout
from staged_pool.runtime.models.quantizing.int8 import to_int8
from staged_pool.runtime.models.quantizing.ranges import InputRange
from staged_pool.runtime.models.transformer.layer_patterns import LayerParts, match_layer

Ranges: TypeAlias = Mapping[nn.Linear, InputRange]


class Activation(NamedTuple):
    """Activation that a kernel applies to a matrix product, by its names in oneDNN."""

    kernel: str
    algorithm: str = ""


_GELU: Final = Activation("gelu", "none")
_GELU_TANH: Final = Activation("gelu", "tanh")
_SWISH: Final = Activation("swish")
_RELU: Final = Activation("relu")

_ACTIVATIONS: Final[Mapping[type[nn.Module], tuple[Activation, float]]] = {
    activations.GELUActivation: (_GELU, 1.0),
    activations.GELUTanh: (_GELU_TANH, 1.0),
    activations.NewGELUActivation: (_GELU_TANH, 1.0),
    activations.FastGELUActivation: (_GELU_TANH, 1.0),
    activations.AccurateGELUActivation: (_GELU_TANH, 1.0),
    activations.QuickGELUActivation: (_SWISH, 1.702),
    activations.SiLUActivation: (_SWISH, 1.0),
    nn.SiLU: (_SWISH, 1.0),
    nn.ReLU: (_RELU, 1.0),
}
"""Kernel f and factor c of each class: its activation of x is f(c x) / c."""

_UNSUPPORTED: Final = (
    "encoder_hidden_states",
    "past_key_values",
    "head_mask",
    "position_bias",
    "sliding_window",
    "softcap",
    "s_aux",
)
"""Arguments that change the result of a layer, and that fused layers do not implement."""


class FusedLayers(nn.Module):
    """Module that computes several encoder layers, one after the other.

    Args:
        parts: Parts of the layers, on the CPU, in float32 or bfloat16. Their matrices are copied to a new layout.
        product: Kernels of the matrix products. None: the usual ones of this processor.
        ranges: Inputs of the linear layers, which then run in int8. None: they run in the dtype of their weights.

    Raises:
        NO_KERNEL: This build of torch, or this processor, does not have these kernels.
    """

    def __init__(
        self, parts: Sequence[LayerParts], product: Product | None = None, ranges: Ranges | None = None
    ) -> None:
        super().__init__()
        self.config = parts[0].config
        self.is_causal = parts[0].causal  # attention functions of transformers read it here
        product = product or default_product(parts[0].down.weight.dtype)
        self.layers = [_fused(layer, product, ranges) for layer in parts]
        """The fused layers, in the order in which they run."""
        self._run = layers_as_one_call()

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *others: None, **settings: Any
    ) -> Tensor:
        """Run all layers: [batch, tokens, width] -> [batch, tokens, width].

        Args:
            hidden_states: Input of the first layer.
            attention_mask: In the form of the model's attention function. None: nothing is masked.
            others: Further positional arguments of decoder layers; all must be None.
            settings: Settings of the model's attention function.

        Raises:
            NotImplementedError: An argument asks for something that fused layers do not compute.
        """
        if any(other is not None for other in others) or any(settings.get(name) is not None for name in _UNSUPPORTED):
            raise NotImplementedError("fused layers take only token vectors, a mask and attention settings")
        shape = hidden_states.shape
        x = hidden_states.flatten(0, 1)
        causal = settings.get("is_causal")
        causal = self.is_causal if causal is None else causal
        kind = self.config._attn_implementation
        if kind == PACKED:
            return self._run(x, list(settings["packed_groups"]), self.layers, causal).view(shape)
        if kind == "sdpa" and attention_mask is None and not causal:
            return self._run(x, [Group(shape[0], shape[1], shape[1])], self.layers, causal).view(shape)
        # "eager" has no interface of its own; sdpa computes the same.
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(kind, sdpa_attention_forward)
        for layer in self.layers:
            qkv = begin_layer(x, layer).view(*shape[:2], 3, layer.heads, -1)
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
            attended = attend(self, q, k, v, attention_mask, scaling=layer.scaling, dropout=0.0, **settings)[0]
            x = finish_layer(x, attended.reshape(x.shape), layer)
        return x.view(shape)


def fusible_layers(model: nn.Module) -> Sequence[tuple[nn.Module, str]]:
    """Find the modules of a model that `FusedLayers` can replace.

    Each is given by its parent and its name there. A module list that holds only such layers is replaced as a whole, by
    one call. Other such layers are replaced one by one.
    """
    places, listed = [], set[nn.Module]()
    for parent in model.modules():  # parents come before their children
        for name, child in parent.named_children():
            layers = _layers(child)
            if child not in listed and layers and all(map(_fusible, layers)):
                places.append((parent, name))
                listed.update(layers)
    return places


def fuse_layers(
    places: Sequence[tuple[nn.Module, str]], product: Product | None = None, ranges: Ranges | None = None
) -> Callable[[], None]:
    """Replace modules by `FusedLayers`, in a model in eval mode on the CPU.

    Args:
        places: Result of `fusible_layers`.
        product: See `FusedLayers`.
        ranges: See `FusedLayers`.

    Returns:
        A function that puts the original layers back.

    Raises:
        NO_KERNEL: See `FusedLayers`.
    """
    originals = [parent.get_submodule(name) for parent, name in places]
    for (parent, name), fused in zip(places, [_fuse(module, product, ranges) for module in originals], strict=True):
        setattr(parent, name, fused)

    def restore() -> None:
        for (parent, name), original in zip(places, originals, strict=True):
            setattr(parent, name, original)

    return restore


def _fuse(module: nn.Module, product: Product | None, ranges: Ranges | None) -> nn.Module:
    """Build the replacement of a layer, or of a list of layers: then a list of one."""
    fused = FusedLayers([parts for layer in _layers(module) if (parts := _fusible(layer))], product, ranges)
    return nn.ModuleList([fused]) if isinstance(module, nn.ModuleList) else fused


def _layers(module: nn.Module) -> Sequence[nn.Module]:
    return [*module] if isinstance(module, nn.ModuleList) else [module]


def _fusible(layer: nn.Module) -> LayerParts | None:
    parts = match_layer(layer)
    return parts if parts is not None and type(parts.activation) in _ACTIVATIONS else None


def _biases(linears: Sequence[nn.Linear]) -> Tensor | None:
    """Concatenate the biases; a missing one is 0. None: all are missing."""
    biases: Sequence[Tensor | None] = [linear.bias for linear in linears]
    if all(bias is None for bias in biases):
        return None
    return torch.cat(
        [
            linear.weight.new_zeros(linear.out_features) if bias is None else bias
            for linear, bias in zip(linears, biases, strict=True)
        ]
    )


def _fused(parts: LayerParts, product: Product, ranges: Ranges | None) -> Layer:
    """Lay out the weights of a layer for the kernels."""
    activation, factor = _ACTIVATIONS[type(parts.activation)]
    first, second = (scale.unsqueeze(1) for scale in parts.scales) if parts.scales else (1.0, 1.0)
    first_norm, second_norm = parts.norms
    laid_out = partial(_laid_out, product=product, ranges=ranges)
    with torch.no_grad():
        return Layer(
            product=product if ranges is None else "int8",
            normed_first=parts.normed_first,
            heads=parts.heads,
            scaling=parts.scaling,
            qkv=laid_out(
                parts.projections[0],
                torch.cat([linear.weight for linear in parts.projections]),
                _biases(parts.projections),
            ),
            out=laid_out(parts.out, *_scaled(parts.out, first)),
            up=laid_out(parts.up, *_scaled(parts.up, factor)),
            activation=activation.kernel,
            algorithm=activation.algorithm,
            down=laid_out(parts.down, *_scaled(parts.down, second, given=factor), given=factor),
            first_norm=first_norm.weight.detach(),
            first_norm_bias=_detached(first_norm.bias),
            first_epsilon=first_norm.eps,
            second_norm=second_norm.weight.detach(),
            second_norm_bias=_detached(second_norm.bias),
            second_epsilon=second_norm.eps,
        )


def _scaled(linear: nn.Linear, scale: Tensor | float, *, given: float = 1.0) -> tuple[Tensor, Tensor | None]:
    """Fold factors into a linear layer: weights and bias that give (x / given W^T + b) * scale.

    Args:
        linear: W and b.
        scale: [out, 1], or one number for all outputs.
        given: Factor that x has already been multiplied with.
    """
    bias: Tensor | None = linear.bias
    if bias is not None:
        bias = (bias.unsqueeze(1) * scale).squeeze(1).detach()
    return linear.weight * (scale / given), bias


def _laid_out(
    linear: nn.Linear,
    weight: Tensor,
    bias: Tensor | None,
    *,
    product: Product,
    ranges: Ranges | None,
    given: float = 1.0,
) -> Matrix:
    """Lay out weights for the kernels.

    Args:
        linear: A layer with the same inputs.
        weight: [out, in].
        bias: [out].
        product: Kernels for floating-point numbers.
        ranges: Inputs of linear layers. None: the weights stay floating-point numbers.
        given: Factor that the inputs have been multiplied with.
    """
    if ranges is None:
        return Matrix(in_layout(weight, product), bias, None)
    return to_int8(weight, bias, ranges[linear].times(given))


def _detached(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.detach()
