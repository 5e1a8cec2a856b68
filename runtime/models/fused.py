"""Layers of encoders that run in a few calls of kernels, instead of in the hundred that their modules make of them.

oneDNN applies the activation to a product, or adds what the half of a layer was given, before it writes the product. An
activation by itself reads and writes the widest values of a layer once more: a quarter of a forward of MiniLM. Queries,
keys and values are one product. And every call that is saved is one less that gives up the interpreter's lock and waits
for it again, beside other threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import activations
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from staged_pool.runtime.models.attention import PACKED, Group, fused_attention
from staged_pool.runtime.models.linear import NONE, Activation, PrepackedLinear
from staged_pool.runtime.models.structures import LayerParts, take_apart

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


class FusedLayer(nn.Module):
    """What the layer that it takes the place of computes.

    Args:
        parts: Of that layer, on the CPU, float32 or bfloat16. Its weights are not kept, except for those of its norms.
    """

    def __init__(self, parts: LayerParts) -> None:
        super().__init__()
        self.config = parts.config
        self.is_causal = parts.causal  # where functions of transformers look for it
        self._heads, self._scaling, self._normed_first = parts.heads, parts.scaling, parts.normed_first
        activation, factor = _ACTIVATIONS[type(parts.activation)]
        first, second = (scale.unsqueeze(1) for scale in parts.scales) if parts.scales else (1.0, 1.0)
        with torch.no_grad():
            self.qkv = PrepackedLinear(torch.cat([one.weight for one in parts.projections]), _biases(parts.projections))
            self.out = _prepacked(parts.out, first)
            self.up = _prepacked(parts.up, factor, activation=activation)
            self.down = _prepacked(parts.down, second, given=factor)
        self.first_norm, self.second_norm = parts.norms

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *others: None, **settings: Any
    ) -> Tensor:
        """[batch, tokens, width] -> the same.

        Args:
            hidden_states: What the layer is given.
            attention_mask: In the form that the model's attention takes. None: there is nothing to mask.
            others: What layers of decoders are given, and nothing here.
            settings: Of the model's attention.

        Raises:
            NotImplementedError: The model wants something of its layers that is not done here.
        """
        if any(one is not None for one in others) or any(settings.get(name) is not None for name in _UNSUPPORTED):
            raise NotImplementedError("a fused layer is given token vectors, a mask, and settings of attention")
        x = hidden_states.flatten(0, 1)
        qkv = self.qkv(self.first_norm(x) if self._normed_first else x)
        x = self.out.added(self._attend(qkv, hidden_states.shape, attention_mask, settings), x)
        if self._normed_first:
            x = self.down.added(self.up(self.second_norm(x)), x)
        else:
            x = self.first_norm(x)
            x = self.second_norm(self.down.added(self.up(x), x))
        return x.view(hidden_states.shape)

    def _attend(
        self, qkv: Tensor, shape: Sequence[int], attention_mask: Tensor | None, settings: Mapping[str, Any]
    ) -> Tensor:
        """[batch * tokens, 3 * width] -> [batch * tokens, width], by the attention that the model has at the moment."""
        batch, tokens = shape[:2]
        kind = self.config._attn_implementation
        causal = settings.get("is_causal")
        causal = self.is_causal if causal is None else causal
        groups: Sequence[Group] | None = None
        if kind == PACKED:
            groups = settings["packed_groups"]
        elif kind == "sdpa" and attention_mask is None and not causal:
            groups = [Group(batch, tokens, tokens)]
        if groups is not None:
            return fused_attention(qkv, groups, self._heads, scaling=self._scaling, causal=causal)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(kind, sdpa_attention_forward)  # for "eager", which it computes
        q, k, v = qkv.view(batch, tokens, 3, self._heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        attended: Tensor = attend(self, q, k, v, attention_mask, scaling=self._scaling, dropout=0.0, **settings)[0]
        return attended.reshape(batch * tokens, -1)


def fusible_layers(model: nn.Module) -> Sequence[tuple[nn.Module, str]]:
    """The layers of a model that a `FusedLayer` can take the place of: each by its parent and its name there."""
    return [(parent, name) for parent in model.modules() for name, child in parent.named_children() if _fusible(child)]


def fuse_layers(places: Sequence[tuple[nn.Module, str]]) -> Callable[[], None]:
    """Put a `FusedLayer` in each of these places, in a model in eval mode that runs on the CPU.

    Args:
        places: As `fusible_layers` has found them.

    Returns:
        Puts the original layers back.

    Raises:
        RuntimeError: This build of torch, or this processor, does not have the kernels.
    """
    layers = [parent.get_submodule(name) for parent, name in places]
    fused = [FusedLayer(parts) for layer in layers if (parts := _fusible(layer)) is not None]
    for (parent, name), layer in zip(places, fused, strict=True):
        setattr(parent, name, layer)

    def restore() -> None:
        for (parent, name), layer in zip(places, layers, strict=True):
            setattr(parent, name, layer)

    return restore


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


def _prepacked(
    linear: nn.Linear, scale: Tensor | float, *, given: float = 1.0, activation: Activation = NONE
) -> PrepackedLinear:
    """f((x / given W^T + b) * scale), without a multiplication beside that of the matrices.

    Args:
        linear: W and b.
        scale: [out, 1], or the same for all.
        given: What all of x has been multiplied with.
        activation: f.
    """
    bias: Tensor | None = linear.bias
    if bias is not None:
        bias = (bias.unsqueeze(1) * scale).squeeze(1)
    return PrepackedLinear(linear.weight * (scale / given), bias, activation)
