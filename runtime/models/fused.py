"""Layers of encoders that run as a few kernels each, instead of the hundred calls that their modules make.

Queries, keys and values are one product. Where oneDNN is good at it, it applies the activation to a product, or adds
what the half of a layer was given, before it writes the product: an activation by itself reads and writes the widest
values of a layer once more, a quarter of a forward of MiniLM in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import activations
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from staged_pool.runtime.models.attention import PACKED
from staged_pool.runtime.models.products import (
    FEW,
    LAYOUTS,
    MANY,
    LayerShape,
    Product,
    as_taken,
    few_tokens,
    quickest_product,
    splits_pay,
    usual_product,
)
from staged_pool.runtime.models.stack import (
    Group,
    Layer,
    begin_layer,
    finish_layer,
    layers_as_one_call,
    split_layer,
)
from staged_pool.runtime.models.structures import LayerParts, take_apart
from staged_pool.runtime.models.tuning import has_wide_vectors, tuning


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


_MOST_FEW_TOKENS: Final = 4096
"""A decision file that says more is not believed."""

_MOST_TWICE_BYTES: Final = 64 << 20
"""Of matrices that are held in two layouts. Those of MiniLM fit. Larger ones are not worth it: where `split` pays, it
does nearly as well for few tokens without memory of its own."""


class FusedLayers(nn.Module):
    """What the layers compute that it takes the place of, one behind the other.

    Args:
        parts: Of those layers, on the CPU, float32 or bfloat16. Their matrices are not kept.
        product: How they multiply. None: in the quickest way.
        short: Whether batches of a few tokens come. Their quickest way may be another one; the matrices are then held
            in both layouts.

    Raises:
        RuntimeError: This build of torch, or this processor, does not have what it takes to multiply so.
    """

    def __init__(self, parts: Sequence[LayerParts], product: Product | None = None, *, short: bool = False) -> None:
        super().__init__()
        self.config = parts[0].config
        self.is_causal = parts[0].causal  # where functions of transformers look for it
        shape = _shape(parts[0])
        many = product or _product(shape, MANY)
        few = product or (_product(shape, FEW) if short and _matrix_bytes(parts) <= _MOST_TWICE_BYTES else many)
        self.layers = [_fused(one, many) for one in parts]
        """In their order."""
        self.layers_of_few = self.layers
        """The same for a few tokens."""
        self.few_alone = self.few_shared = 0
        """Up to how many tokens are few, on one thread and on several."""
        threads = tuning().threads
        if few == many == "plain" and product is None and _splits(shape, threads):
            few = "split"
        if few != many:
            self.few_alone, self.few_shared = (_few(shape, few, many, count) for count in (1, threads))
        if self.few_alone or self.few_shared:
            split = few == "split"
            self.layers_of_few = (
                [split_layer(layer, threads) for layer in self.layers] if split else [_fused(one, few) for one in parts]
            )
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
        few = self.few_alone if torch.get_num_threads() == 1 else self.few_shared
        layers = self.layers_of_few if x.shape[0] <= few else self.layers
        causal = settings.get("is_causal")
        causal = self.is_causal if causal is None else causal
        kind = self.config._attn_implementation
        if kind == PACKED:
            return self._run(x, list(settings["packed_groups"]), layers, causal).view(shape)
        if kind == "sdpa" and attention_mask is None and not causal:
            return self._run(x, [Group(shape[0], shape[1], shape[1])], layers, causal).view(shape)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(kind, sdpa_attention_forward)  # for "eager", which it computes
        for layer in layers:
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


def fuse_layers(
    places: Sequence[tuple[nn.Module, str]], product: Product | None = None, *, short: bool = False
) -> Callable[[], None]:
    """Put `FusedLayers` in each of these places, in a model in eval mode that runs on the CPU.

    Args:
        places: As `fusible_layers` has found them.
        product: See `FusedLayers`.
        short: See `FusedLayers`.

    Returns:
        Puts the original layers back.

    Raises:
        RuntimeError: This build of torch, or this processor, does not have what it takes to multiply so.
    """
    found = [parent.get_submodule(name) for parent, name in places]
    for (parent, name), one in zip(places, [_fuse(one, product, short) for one in found], strict=True):
        setattr(parent, name, one)

    def restore() -> None:
        for (parent, name), one in zip(places, found, strict=True):
            setattr(parent, name, one)

    return restore


def _fuse(found: nn.Module, product: Product | None, short: bool) -> nn.Module:
    """What takes the place of a layer, or of a list of layers: a list of one that does everything."""
    fused = FusedLayers([parts for layer in _layers(found) if (parts := _fusible(layer))], product, short=short)
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


def _shape(parts: LayerParts) -> LayerShape:
    activation, _ = _ACTIVATIONS[type(parts.activation)]
    width, inner = parts.down.weight.shape
    return LayerShape(width, inner, parts.heads, parts.down.weight.dtype, *activation)


def _product(shape: LayerShape, batches: tuple[Group, ...]) -> Product:
    """How layers of a shape multiply such batches on this processor, at every start."""
    tokens = "+".join(str(batch.sequences * batch.tokens) for batch in batches)
    found = tuning().choose(
        f"product, {tokens} tokens, {_said(shape)}",
        table=cast("str", usual_product()),
        measure=lambda: quickest_product(shape, batches),
        allowed=lambda kept: kept in LAYOUTS,
    )
    return cast("Product", found)


def _splits(shape: LayerShape, threads: int) -> bool:
    """Threads that share a few tokens multiply with parts of the matrices, at every start."""
    return tuning().choose(
        f"split among {threads}, {_said(shape)}",
        table=threads > 1 and not has_wide_vectors(),
        measure=lambda: splits_pay(shape, threads),
        allowed=lambda kept: isinstance(kept, bool),
    )


def _few(shape: LayerShape, few: Product, many: Product, threads: int) -> int:
    """Up to how many tokens are few, at every start."""
    if few == "split":
        return few_tokens(shape, few, many, threads)  # which is not measured
    return tuning().choose(
        f"few tokens on {threads}, {few} and {many}, {_said(shape)}",
        table=0,
        measure=lambda: few_tokens(shape, few, many, threads),
        allowed=lambda kept: type(kept) is int and 0 <= kept <= _MOST_FEW_TOKENS,
    )


def _said(shape: LayerShape) -> str:
    return ", ".join(f"{name} {value}" for name, value in shape._asdict().items() if value)


def _matrix_bytes(parts: Sequence[LayerParts]) -> int:
    linears = [linear for one in parts for linear in (*one.projections, one.out, one.up, one.down)]
    return sum(linear.weight.nbytes for linear in linears)


def _fused(parts: LayerParts, product: Product) -> Layer:
    """A layer's weights, as the kernels take them."""
    if product == "split":
        return split_layer(_fused(parts, "plain"), tuning().threads)
    activation, factor = _ACTIVATIONS[type(parts.activation)]
    first, second = (scale.unsqueeze(1) for scale in parts.scales) if parts.scales else (1.0, 1.0)
    first_norm, second_norm = parts.norms
    with torch.no_grad():
        qkv = as_taken(torch.cat([one.weight for one in parts.projections]), product)
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
    return as_taken(linear.weight * (scale / given), product), bias


def _detached(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.detach()
