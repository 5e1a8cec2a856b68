"""What layers of encoders are made of: their parts, found by where a known kind of layer has them.

The class of a layer is not looked at, since there are dozens that differ by their names only. Instead, a layer must
have all parts of a kind, and no weight and no module beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class _Structure:
    """Where a kind of layer has its parts."""

    normed_first: bool
    attention: str
    projections: tuple[str, str, str]
    """Of queries, keys and values, in `attention`."""
    out: str
    norms: tuple[str, str]
    """Of the half with attention, and of the other."""
    up: str = "mlp.fc1"
    activation: str = "mlp.activation_fn"
    down: str = "mlp.fc2"
    scales: tuple[str, ...] = ()
    """Of what each half adds, by a factor for each value. None: it adds it as it is."""


_STRUCTURES: Final = (
    _Structure(  # BERT and its relatives
        normed_first=False,
        attention="attention.self",
        projections=("query", "key", "value"),
        out="attention.output.dense",
        norms=("attention.output.LayerNorm", "output.LayerNorm"),
        up="intermediate.dense",
        activation="intermediate.intermediate_act_fn",
        down="output.dense",
    ),
    _Structure(  # DistilBERT
        normed_first=False,
        attention="attention",
        projections=("q_lin", "k_lin", "v_lin"),
        out="attention.out_lin",
        norms=("sa_layer_norm", "output_layer_norm"),
        up="ffn.lin1",
        activation="ffn.activation",
        down="ffn.lin2",
    ),
    _Structure(  # CLIP, SigLIP and SigLIP2
        normed_first=True,
        attention="self_attn",
        projections=("q_proj", "k_proj", "v_proj"),
        out="self_attn.out_proj",
        norms=("layer_norm1", "layer_norm2"),
    ),
    _Structure(  # ViT
        normed_first=True,
        attention="attention",
        projections=("q_proj", "k_proj", "v_proj"),
        out="attention.o_proj",
        norms=("layernorm_before", "layernorm_after"),
    ),
    _Structure(  # DINOv2
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
    """A layer in two halves: attention, and two linear layers with an activation between them. Each adds to what it was
    given."""

    normed_first: bool
    """Whether a norm stands in front of each half, or behind its sum."""
    config: Any
    """Of the model, which says how it attends."""
    causal: bool
    """Whether a token sees only what stands before it, where the model says nothing else."""
    heads: int
    scaling: float
    """Of the scores of attention."""
    projections: Sequence[nn.Linear]
    """To queries, keys and values, which are equally wide."""
    out: nn.Linear
    norms: Sequence[nn.LayerNorm]
    """Of the half with attention, and of the other."""
    up: nn.Linear
    activation: nn.Module
    down: nn.Linear
    scales: Sequence[Tensor]
    """[width] each: factors of what `out` and `down` add. Empty: there are none."""


def take_apart(layer: nn.Module) -> LayerParts | None:
    """What a layer is made of. None: it is of no kind that is known here, or holds something else as well."""
    for structure in _STRUCTURES:
        try:
            parts = _take_apart(layer, structure)
        except AttributeError:  # it does not have one of them
            continue
        if parts is not None:
            return parts
    return None


def _take_apart(layer: nn.Module, structure: _Structure) -> LayerParts | None:
    """As `take_apart`, for one kind.

    Raises:
        AttributeError: The layer does not have one of the parts.
    """
    attention = layer.get_submodule(structure.attention)
    projections = [_linear(attention, name) for name in structure.projections]
    out, up, down = (_linear(layer, path) for path in (structure.out, structure.up, structure.down))
    norms = [_norm(layer, path) for path in structure.norms]
    activation = layer.get_submodule(structure.activation)
    scales = [layer.get_parameter(path) for path in structure.scales]
    heads: int = _first(attention, "num_attention_heads", "num_heads", "n_heads")
    scaling: float = _first(attention, "scaling", "scale")
    widths = {one.out_features for one in projections} | {out.in_features}
    if len(widths) > 1 or out.in_features % heads:
        return None
    if getattr(layer, "is_decoder", False) or not _holds_only(
        layer, [*projections, out, *norms, up, activation, down], scales
    ):
        return None
    return LayerParts(
        normed_first=structure.normed_first,
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
    """
    Raises:
        AttributeError: There is none. A subclass is none: it may compute something else.
    """
    found = module.get_submodule(path)
    if type(found) is not nn.Linear:
        raise AttributeError(path)
    return found


def _norm(module: nn.Module, path: str) -> nn.LayerNorm:
    """As `_linear`."""
    found = module.get_submodule(path)
    if type(found) is not nn.LayerNorm:
        raise AttributeError(path)
    return found


def _first(module: nn.Module, *names: str) -> Any:
    """The first of these attributes that a module has.

    Raises:
        AttributeError: It has none.
    """
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(names[0])


def _holds_only(layer: nn.Module, parts: Sequence[nn.Module], scales: Sequence[Tensor]) -> bool:
    """Whether a layer has no weight, and computes nothing, beside what is known of it."""
    weights = {id(weight) for part in parts for weight in part.parameters()} | {id(scale) for scale in scales}
    if any(id(weight) not in weights for weight in layer.parameters()) or list(layer.buffers()):
        return False
    known = {id(module) for part in parts for module in part.modules()}
    leaves = (module for module in layer.modules() if id(module) not in known and not list(module.children()))
    return all(type(leaf) in _NOTHING or _is_scale(leaf, scales) for leaf in leaves)


def _is_scale(module: nn.Module, scales: Sequence[Tensor]) -> bool:
    held = list(module.parameters())
    return len(held) == 1 and any(held[0] is scale for scale in scales)
