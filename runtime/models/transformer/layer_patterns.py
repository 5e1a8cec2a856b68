"""Parts of encoder layers, found by the module names of known architectures.

The class of a layer does not matter, since dozens differ only in their names. A layer must have all parts of a pattern,
and no other weight or module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerPattern:
    """Module names of the parts of one kind of layer."""

    normed_first: bool
    attention: str
    projections: tuple[str, str, str]
    """Queries, keys and values: names inside of `attention`."""
    out: str
    norms: tuple[str, str]
    """Norm of attention, and norm of the feed-forward half."""
    up: str = "mlp.fc1"
    activation: str = "mlp.activation_fn"
    down: str = "mlp.fc2"
    scales: tuple[str, ...] = ()
    """Parameters that scale the output of each half, value by value. Empty: there are none."""


_PATTERNS: Final = (
    _LayerPattern(  # BERT and its relatives
        normed_first=False,
        attention="attention.self",
        projections=("query", "key", "value"),
        out="attention.output.dense",
        norms=("attention.output.LayerNorm", "output.LayerNorm"),
        up="intermediate.dense",
        activation="intermediate.intermediate_act_fn",
        down="output.dense",
    ),
    _LayerPattern(  # DistilBERT
        normed_first=False,
        attention="attention",
        projections=("q_lin", "k_lin", "v_lin"),
        out="attention.out_lin",
        norms=("sa_layer_norm", "output_layer_norm"),
        up="ffn.lin1",
        activation="ffn.activation",
        down="ffn.lin2",
    ),
    _LayerPattern(  # CLIP, SigLIP and SigLIP2
        normed_first=True,
        attention="self_attn",
        projections=("q_proj", "k_proj", "v_proj"),
        out="self_attn.out_proj",
        norms=("layer_norm1", "layer_norm2"),
    ),
    _LayerPattern(  # ViT
        normed_first=True,
        attention="attention",
        projections=("q_proj", "k_proj", "v_proj"),
        out="attention.o_proj",
        norms=("layernorm_before", "layernorm_after"),
    ),
    _LayerPattern(  # DINOv2
        normed_first=True,
        attention="attention",
        projections=("q_proj", "k_proj", "v_proj"),
        out="attention.o_proj",
        norms=("norm1", "norm2"),
        scales=("layer_scale1.lambda1", "layer_scale2.lambda1"),
    ),
)

_NOTHING: Final = (nn.Dropout, nn.Identity)
"""Modules that do nothing in eval mode."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerParts:
    """Parts of a layer with two residual halves: attention, and a feed-forward network."""

    normed_first: bool
    """Normalize the input of each half (pre-norm). False: its output, with the residual added (post-norm)."""
    config: Any
    """Config of the model, with its attention function."""
    causal: bool
    """Attend to earlier tokens only, unless an argument of the forward says otherwise."""
    heads: int
    scaling: float
    """Factor of attention scores."""
    projections: Sequence[nn.Linear]
    """Linear layers to queries, keys and values; all of one width."""
    out: nn.Linear
    norms: Sequence[nn.LayerNorm]
    """Norm of attention, and norm of the feed-forward half."""
    up: nn.Linear
    activation: nn.Module
    down: nn.Linear
    scales: Sequence[Tensor]
    """[width] each: factors of the outputs of `out` and of `down`. Empty: there are none."""


def match_layer(layer: nn.Module) -> LayerParts | None:
    """Return the parts of a layer. None: it matches no pattern, or holds something else as well."""
    for pattern in _PATTERNS:
        try:
            parts = _match_layer(layer, pattern)
        except AttributeError:  # a part is missing
            continue
        if parts is not None:
            return parts
    return None


def _match_layer(layer: nn.Module, pattern: _LayerPattern) -> LayerParts | None:
    """Match a layer with one pattern; see `match_layer`.

    Raises:
        AttributeError: A part is missing.
    """
    attention = layer.get_submodule(pattern.attention)
    projections = [_linear(attention, name) for name in pattern.projections]
    out, up, down = (_linear(layer, path) for path in (pattern.out, pattern.up, pattern.down))
    norms = [_norm(layer, path) for path in pattern.norms]
    activation = layer.get_submodule(pattern.activation)
    scales = [layer.get_parameter(path) for path in pattern.scales]
    heads: int = _first(attention, "num_attention_heads", "num_heads", "n_heads")
    scaling: float = _first(attention, "scaling", "scale")
    widths = {linear.out_features for linear in projections} | {out.in_features}
    if len(widths) > 1 or out.in_features % heads:
        return None
    if getattr(layer, "is_decoder", False) or not _holds_only(
        layer, [*projections, out, *norms, up, activation, down], scales
    ):
        return None
    return LayerParts(
        normed_first=pattern.normed_first,
        config=attention.config,
        causal=bool(getattr(attention, "is_causal", False)),
        heads=heads,
        scaling=scaling,
        projections=projections,
        out=out,
        norms=norms,
        up=up,
        activation=activation,
        down=down,
        scales=scales,
    )


def _linear(module: nn.Module, path: str) -> nn.Linear:
    """Return a linear layer of a module.

    Raises:
        AttributeError: There is none. A subclass does not count: it may compute something else.
    """
    found = module.get_submodule(path)
    if type(found) is not nn.Linear:
        raise AttributeError(path)
    return found


def _norm(module: nn.Module, path: str) -> nn.LayerNorm:
    """Return a layer norm of a module; errors as for `_linear`."""
    found = module.get_submodule(path)
    if type(found) is not nn.LayerNorm:
        raise AttributeError(path)
    return found


def _first(module: nn.Module, *names: str) -> Any:
    """Return the first of these attributes that a module has.

    Raises:
        AttributeError: It has none of them.
    """
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(names[0])


def _holds_only(layer: nn.Module, parts: Sequence[nn.Module], scales: Sequence[Tensor]) -> bool:
    """Tell whether a layer has no weights and no computing modules other than these."""
    weights = {id(weight) for part in parts for weight in part.parameters()} | {id(scale) for scale in scales}
    if any(id(weight) not in weights for weight in layer.parameters()) or list(layer.buffers()):
        return False
    known = {id(module) for part in parts for module in part.modules()}
    leaves = (module for module in layer.modules() if id(module) not in known and not list(module.children()))
    return all(type(leaf) in _NOTHING or _is_scale(leaf, scales) for leaf in leaves)


def _is_scale(module: nn.Module, scales: Sequence[Tensor]) -> bool:
    held = list(module.parameters())
    return len(held) == 1 and any(held[0] is scale for scale in scales)
