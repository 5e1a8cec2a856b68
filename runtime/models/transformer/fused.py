"""Layers of encoders that run as a few kernels each, instead of the hundred calls that their modules make.

Queries, keys and values are one product. Where the processor has AVX-512, oneDNN applies the activation, or adds what
the half of a layer was given, before it writes the product: otherwise the activation reads and writes the widest values
of a layer once more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from transformers import activations
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from staged_pool.runtime.models.kernels.attention import PACKED
from staged_pool.runtime.models.kernels.encoder_layers import (
    Group,
    Layer,
    begin_layer,
    finish_layer,
    layers_as_one_call,
)
from staged_pool.runtime.models.kernels.linear import Product, laid_out, usual_product
from staged_pool.runtime.models.transformer.layer_patterns import LayerParts, take_apart


class Activation(NamedTuple):
    """What a kernel applies to a product before it is written, by oneDNN's names."""

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
"""For each class the kernel f and a factor c, with which it gives f(c x) / c."""

_UNSUPPORTED: Final = (
    "encoder_hidden_states",
    "past_key_values",
    "head_mask",
    "position_bias",
    "sliding_window",
    "softcap",
    "s_aux",
)
"""Arguments that change what a layer computes."""


class FusedLayers(nn.Module):
    """What the layers compute that it takes the place of, one behind the other.

    Args:
        parts: Of those layers, on the CPU, float32 or bfloat16. Their matrices are not kept.
        product: The way in which they multiply. None: the usual way of this processor.

    Raises:
        NO_KERNEL: This build of torch, or this processor, does not have the kernels of that way.
    """

    def __init__(self, parts: Sequence[LayerParts], product: Product | None = None) -> None:
        super().__init__()
        self.config = parts[0].config
        self.is_causal = parts[0].causal  # where functions of transformers look for it
        product = product or usual_product(parts[0].down.weight.dtype)
        self.layers = [_fused(one, product) for one in parts]
        """In their order."""
        self._run = layers_as_one_call()

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *others: None, **settings: Any
    ) -> Tensor:
        """[batch, tokens, width] -> the same.

        Args:
            hidden_states: What the first layer is given.
            attention_mask: In the form that the model's attention takes. None: there is nothing to mask.
            others: What layers of decoders are given, and nothing here.
            settings: Of the model's attention.

        Raises:
            NotImplementedError: The model wants something of its layers that is not done here.
        """
        if any(one is not None for one in others) or any(settings.get(name) is not None for name in _UNSUPPORTED):
            raise NotImplementedError("fused layers are given token vectors, a mask, and settings of attention")
        shape = hidden_states.shape
        x = hidden_states.flatten(0, 1)
        causal = settings.get("is_causal")
        causal = self.is_causal if causal is None else causal
        kind = self.config._attn_implementation
        if kind == PACKED:
            return self._run(x, list(settings["packed_groups"]), self.layers, causal).view(shape)
        if kind == "sdpa" and attention_mask is None and not causal:
            return self._run(x, [Group(shape[0], shape[1], shape[1])], self.layers, causal).view(shape)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(kind, sdpa_attention_forward)  # for "eager", which it computes
        for layer in self.layers:
            qkv = begin_layer(x, layer).view(*shape[:2], 3, layer.heads, -1)
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
            attended = attend(self, q, k, v, attention_mask, scaling=layer.scaling, dropout=0.0, **settings)[0]
            x = finish_layer(x, attended.reshape(x.shape), layer)
        return x.view(shape)


def fusible_layers(model: nn.Module) -> Sequence[tuple[nn.Module, str]]:
    """What `FusedLayers` can take the place of in a model: each by its parent and its name there.

    Lists of nothing but layers that can be fused, which then are one call, and layers among others.
    """
    places, listed = [], set[nn.Module]()
    for parent in model.modules():  # parents come before their children
        for name, child in parent.named_children():
            layers = _layers(child)
            if child not in listed and layers and all(map(_fusible, layers)):
                places.append((parent, name))
                listed.update(layers)
    return places


def fuse_layers(places: Sequence[tuple[nn.Module, str]], product: Product | None = None) -> Callable[[], None]:
    """Put `FusedLayers` in each of these places, in a model in eval mode that runs on the CPU.

    Args:
        places: As `fusible_layers` has found them.
        product: See `FusedLayers`.

    Returns:
        Puts the original layers back.

    Raises:
        NO_KERNEL: See `FusedLayers`.
    """
    found = [parent.get_submodule(name) for parent, name in places]
    for (parent, name), one in zip(places, [_fuse(one, product) for one in found], strict=True):
        setattr(parent, name, one)

    def restore() -> None:
        for (parent, name), one in zip(places, found, strict=True):
            setattr(parent, name, one)

    return restore


def _fuse(found: nn.Module, product: Product | None) -> nn.Module:
    """What takes the place of a layer, or of a list of layers: a list of one that does everything."""
    fused = FusedLayers([parts for layer in _layers(found) if (parts := _fusible(layer))], product)
    return nn.ModuleList([fused]) if isinstance(found, nn.ModuleList) else fused


def _layers(found: nn.Module) -> Sequence[nn.Module]:
    return [*found] if isinstance(found, nn.ModuleList) else [found]


def _fusible(layer: nn.Module) -> LayerParts | None:
    parts = take_apart(layer)
    return parts if parts is not None and type(parts.activation) in _ACTIVATIONS else None


def _biases(linears: Sequence[nn.Linear]) -> Tensor | None:
    """Side by side; 0 where one of them has none. None: all have none."""
    biases: Sequence[Tensor | None] = [one.bias for one in linears]
    if all(bias is None for bias in biases):
        return None
    return torch.cat(
        [
            one.weight.new_zeros(one.out_features) if bias is None else bias
            for one, bias in zip(linears, biases, strict=True)
        ]
    )


def _fused(parts: LayerParts, product: Product) -> Layer:
    """A layer's weights, as the kernels take them."""
    activation, factor = _ACTIVATIONS[type(parts.activation)]
    first, second = (scale.unsqueeze(1) for scale in parts.scales) if parts.scales else (1.0, 1.0)
    first_norm, second_norm = parts.norms
    with torch.no_grad():
        qkv = laid_out(torch.cat([one.weight for one in parts.projections]), product)
        out, out_bias = _scaled(parts.out, first, product)
        up, up_bias = _scaled(parts.up, factor, product)
        down, down_bias = _scaled(parts.down, second, product, given=factor)
    return Layer(
        product=product,
        normed_first=parts.normed_first,
        heads=parts.heads,
        scaling=parts.scaling,
        qkv=qkv,
        qkv_bias=_biases(parts.projections),
        out=out,
        out_bias=out_bias,
        up=up,
        up_bias=up_bias,
        activation=activation.kernel,
        algorithm=activation.algorithm,
        down=down,
        down_bias=down_bias,
        first_norm=first_norm.weight.detach(),
        first_norm_bias=_detached(first_norm.bias),
        first_epsilon=first_norm.eps,
        second_norm=second_norm.weight.detach(),
        second_norm_bias=_detached(second_norm.bias),
        second_epsilon=second_norm.eps,
    )


def _scaled(
    linear: nn.Linear, scale: Tensor | float, product: Product, *, given: float = 1.0
) -> tuple[Tensor, Tensor | None]:
    """The weights of (x / given W^T + b) * scale, without a multiplication beside that of the matrices.

    Args:
        linear: W and b.
        scale: [out, 1], or the same for all.
        product: What the weights are laid out for.
        given: What all of x has been multiplied with.
    """
    bias: Tensor | None = linear.bias
    if bias is not None:
        bias = (bias.unsqueeze(1) * scale).squeeze(1).detach()
    return laid_out(linear.weight * (scale / given), product), bias


def _detached(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.detach()
