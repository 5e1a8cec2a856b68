"""Layers of encoders one behind the other, as one call that holds the interpreter's lock at its beginning only.

Every call of a kernel from Python gives up the lock, and waits for it again at its end: beside an event loop and other
threads, a forward of fifty such calls waits fifty times, and so does everyone else for it. Written in the part of
Python that TorchScript knows, all layers are one call. (Its successors need a compiler where the model is served.)
Where a build of torch does not have it any more, the same functions run as the Python that they are.
"""
# Without `annotations` from __future__: TorchScript reads those of a NamedTuple, and they must not be strings.

import warnings
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from staged_pool.runtime.models.kernels.torch_parts import torch_part
from staged_pool.stages.log import get_logger

log = get_logger("staged_pool.models")

_IN_PARTS: Final = "layers are called one kernel at a time"


def _never() -> bool:
    return False


is_scripting: Final = torch_part("torch.jit.is_scripting", instead=_IN_PARTS) or _never


class Group(NamedTuple):
    """Neighbours of equal length in a batch, which share a call of the kernel."""

    sequences: int
    tokens: int
    """Of each."""
    seen: int
    """Leading tokens of each that its tokens attend to: all, unless it ends in a query's expansion."""


class Layer(NamedTuple):
    """One layer in two halves: attention, and two linear layers with an activation between them. Each adds to what it
    was given. Matrices are on the CPU."""

    product: str
    """The way in which it multiplies, as `Product` has it; its matrices are laid out for that. `plain`: [in, out]."""
    normed_first: bool
    """Whether a norm stands in front of each half, or behind its sum."""
    heads: int
    """Of queries, keys and values alike."""
    scaling: float
    """Of the scores of attention."""
    qkv: Tensor
    """To queries, keys and values side by side."""
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    up: Tensor
    up_bias: Tensor | None
    activation: str
    """By oneDNN's name, and that of its algorithm."""
    algorithm: str
    down: Tensor
    down_bias: Tensor | None
    first_norm: Tensor
    """Factors, and what is added, of the norm of the half with attention."""
    first_norm_bias: Tensor | None
    first_epsilon: float
    second_norm: Tensor
    second_norm_bias: Tensor | None
    second_epsilon: float


RunLayers: TypeAlias = Callable[[Tensor, list[Group], list[Layer], bool], Tensor]


def run_layers(x: Tensor, groups: list[Group], layers: list[Layer], causal: bool) -> Tensor:
    """Run the layers on a packed batch.

    Args:
        x: [tokens, width], in the dtype of the weights.
        groups: Their tokens sum to those of `x`.
        layers: In their order.
        causal: True: a token sees only what stands before it.

    Returns:
        [tokens, width].
    """
    for layer in layers:
        x = finish_layer(x, attend(begin_layer(x, layer), groups, layer, causal), layer)
    return x


def begin_layer(x: Tensor, layer: Layer) -> Tensor:
    """[tokens, width] -> [tokens, 3 * width]: queries, keys and values of a token side by side."""
    if layer.normed_first:
        x = F.layer_norm(x, [x.shape[1]], layer.first_norm, layer.first_norm_bias, layer.first_epsilon)
    return linear(x, layer.qkv, layer.qkv_bias, layer.product)


def finish_layer(x: Tensor, attended: Tensor, layer: Layer) -> Tensor:
    """What a layer gives: [tokens, width].

    Args:
        x: [tokens, width]: what it is given.
        attended: [tokens, width]: by its attention.
        layer: Its weights.
    """
    width = [x.shape[1]]
    x = linear_added(attended, layer.out, layer.out_bias, x, layer.product)
    if layer.normed_first:
        given = F.layer_norm(x, width, layer.second_norm, layer.second_norm_bias, layer.second_epsilon)
    else:
        given = x = F.layer_norm(x, width, layer.first_norm, layer.first_norm_bias, layer.first_epsilon)
    x = linear_added(widened(given, layer), layer.down, layer.down_bias, x, layer.product)
    if layer.normed_first:
        return x
    return F.layer_norm(x, width, layer.second_norm, layer.second_norm_bias, layer.second_epsilon)


def attend(qkv: Tensor, groups: list[Group], layer: Layer, causal: bool) -> Tensor:
    """Attend within each sequence of a packed batch: softmax(Q K^T * scaling) V.

    Args:
        qkv: [tokens, 3 * heads * head width]: queries, keys and values of a token side by side.
        groups: Their tokens sum to those of `qkv`.
        layer: Whose attention it is.
        causal: True: a token sees only what stands before it.

    Returns:
        [tokens, heads * head width].
    """
    width, heads = qkv.shape[1] // 3, layer.heads
    attended: list[Tensor] = []
    start = 0
    for group in groups:
        end = start + group.sequences * group.tokens
        part = qkv[start:end]
        start = end
        if group.tokens == 1 and group.seen == 1:
            attended.append(part[:, 2 * width :])  # the softmax of one score is 1
            continue
        by_head = part.view(group.sequences, group.tokens, 3, heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = by_head[0], by_head[1], by_head[2]
        mask: Tensor | None = None
        if group.seen < group.tokens:
            k, v = k[:, :, : group.seen], v[:, :, : group.seen]
            if causal:
                every = torch.ones([group.tokens, group.tokens], dtype=torch.bool)
                mask = every.tril()[:, : group.seen]
        one = F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal and mask is None, scale=layer.scaling)
        attended.append(one.transpose(1, 2).reshape(-1, width))  # nothing is moved: the kernel lays it out like that
    return attended[0] if len(attended) == 1 else torch.cat(attended)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, product: str) -> Tensor:
    """x W^T + b: [tokens, in] -> [tokens, out]."""
    if product == "plain":
        return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)
    return _pointwise(x, weight, bias, "none", "")


def widened(x: Tensor, layer: Layer) -> Tensor:
    """The first linear layer behind attention, with its activation: [tokens, width] -> [tokens, inner]."""
    if layer.product == "fused":
        return _pointwise(x, layer.up, layer.up_bias, layer.activation, layer.algorithm)
    y = linear(x, layer.up, layer.up_bias, layer.product)
    if layer.activation == "gelu":
        torch.ops.aten.gelu_(y, approximate=layer.algorithm)
    elif layer.activation == "swish":
        torch.ops.aten.silu_(y)
    else:
        torch.relu_(y)
    return y


def linear_added(x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor, product: str) -> Tensor:
    """x W^T + b + other: [tokens, in] and [tokens, out] -> [tokens, out]."""
    if product == "fused":
        if is_scripting():
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, other, weight, bias, "add")
        else:  # Python finds out which of the two is meant by trying, and writes what it tried into an error: 0.7 ms
            y = torch.ops.mkldnn._linear_pointwise.binary(x, other, weight, bias, "add")
        return y
    return linear(x, weight, bias, product).add_(other)


def _pointwise(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, algorithm: str) -> Tensor:
    scalars: list[int | float | complex | None] = []  # of the activation
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, scalars, algorithm)
    return y


def layers_as_one_call(part: Callable[..., Any] = torch_part) -> RunLayers:
    """Return `run_layers`, as one call if this build of torch has TorchScript. It may run in several threads at once.

    Args:
        part: Looks up a part of torch, see `torch_part`.
    """
    script, optimized_execution = (
        part(f"torch.jit.{name}", instead=_IN_PARTS) for name in ("script", "optimized_execution")
    )
    if script is None or optimized_execution is None:
        return run_layers
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            scripted: RunLayers = script(run_layers)
            with optimized_execution(False):
                pass
    except Exception as error:  # noqa: BLE001  # what it cannot script, it says in many ways
        log.info("model.not_scripted", reason=str(error), instead=_IN_PARTS)
        return run_layers

    def run(x: Tensor, groups: list[Group], layers: list[Layer], causal: bool) -> Tensor:
        with optimized_execution(False):  # which would be for the sizes of one batch, and no other has them
            return scripted(x, groups, layers, causal)

    return run
