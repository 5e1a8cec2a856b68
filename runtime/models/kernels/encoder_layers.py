"""Encoder layers as one TorchScript call, which takes the interpreter's lock once.

Each kernel call from Python releases the lock and has to take it again at its end. A forward of fifty calls beside an
event loop and other threads waits for the lock fifty times, and they wait for the forward. So these functions keep to
the subset of Python that TorchScript compiles. (Its successors need a C compiler on the server.) If a build of torch
has no TorchScript, the same functions run as Python.
"""
# Without `annotations` from __future__: TorchScript reads those of a NamedTuple, and they must not be strings.

import warnings
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from staged_pool.runtime.models.kernels.optional_torch import optional_torch
from staged_pool.stages.log import get_logger

log = get_logger("staged_pool.models")

_IN_PARTS: Final = "layers run as one call per kernel"


def _never() -> bool:
    return False


is_scripting: Final = optional_torch("torch.jit.is_scripting", instead=_IN_PARTS) or _never


class Group(NamedTuple):
    """Adjacent sequences of equal length in a batch, which share one kernel call."""

    sequences: int
    tokens: int
    """Tokens of each sequence."""
    key_tokens: int
    """Leading tokens of each sequence that are attended to: all, unless it ends in a query's expansion."""


class Layer(NamedTuple):
    """Weights of one encoder layer: attention, then two linear layers with an activation between them.

    Both halves have a residual connection. Matrices are on the CPU.
    """

    product: str
    """A `Product`, which decides the layout of the matrices. `plain`: [in, out]."""
    normed_first: bool
    """True: pre-norm, a norm before each half. False: post-norm, a norm after each sum."""
    heads: int
    """Number of heads: the same for queries, keys and values."""
    scaling: float
    """Factor of the attention scores."""
    qkv: Tensor
    """Matrix of the projections to queries, keys and values, side by side."""
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    up: Tensor
    up_bias: Tensor | None
    activation: str
    """oneDNN's name of the activation."""
    algorithm: str
    """oneDNN's name of the activation's algorithm."""
    down: Tensor
    down_bias: Tensor | None
    first_norm: Tensor
    """Factors of the norm of the attention half."""
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
        groups: Groups of the batch. Their tokens sum to those of `x`.
        layers: The layers, in order.
        causal: A token attends to itself and earlier tokens only.

    Returns:
        [tokens, width].
    """
    for layer in layers:
        x = finish_layer(x, attend(begin_layer(x, layer), groups, layer, causal), layer)
    return x


def begin_layer(x: Tensor, layer: Layer) -> Tensor:
    """Project to queries, keys and values of each token, side by side: [tokens, width] -> [tokens, 3 * width]."""
    if layer.normed_first:
        x = F.layer_norm(x, [x.shape[1]], layer.first_norm, layer.first_norm_bias, layer.first_epsilon)
    return linear(x, layer.qkv, layer.qkv_bias, layer.product)


def finish_layer(x: Tensor, attended: Tensor, layer: Layer) -> Tensor:
    """Run the part of a layer after attention. Returns [tokens, width].

    Args:
        x: [tokens, width]: input of the layer.
        attended: [tokens, width]: result of its attention.
        layer: Its weights.
    """
    width = [x.shape[1]]
    x = linear_added(attended, layer.out, layer.out_bias, x, layer.product)
    if layer.normed_first:
        given = F.layer_norm(x, width, layer.second_norm, layer.second_norm_bias, layer.second_epsilon)
    else:
        given = x = F.layer_norm(x, width, layer.first_norm, layer.first_norm_bias, layer.first_epsilon)
    x = linear_added(up_projection(given, layer), layer.down, layer.down_bias, x, layer.product)
    if layer.normed_first:
        return x
    return F.layer_norm(x, width, layer.second_norm, layer.second_norm_bias, layer.second_epsilon)


def attend(qkv: Tensor, groups: list[Group], layer: Layer, causal: bool) -> Tensor:
    """Attend within each sequence of a packed batch: softmax(Q K^T * scaling) V.

    Args:
        qkv: [tokens, 3 * heads * head width]: queries, keys and values of a token side by side.
        groups: Groups of the batch. Their tokens sum to those of `qkv`.
        layer: The layer of this attention.
        causal: A token attends to itself and earlier tokens only.

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
        if group.tokens == 1 and group.key_tokens == 1:
            attended.append(part[:, 2 * width :])  # the softmax of one score is 1
            continue
        by_head = part.view(group.sequences, group.tokens, 3, heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = by_head[0], by_head[1], by_head[2]
        mask: Tensor | None = None
        if group.key_tokens < group.tokens:
            k, v = k[:, :, : group.key_tokens], v[:, :, : group.key_tokens]
            if causal:
                every = torch.ones([group.tokens, group.tokens], dtype=torch.bool)
                mask = every.tril()[:, : group.key_tokens]
        one = F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal and mask is None, scale=layer.scaling)
        attended.append(one.transpose(1, 2).reshape(-1, width))  # no copy: the kernel writes in that order
    return attended[0] if len(attended) == 1 else torch.cat(attended)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, product: str) -> Tensor:
    """x W^T + b: [tokens, in] -> [tokens, out]."""
    if product == "plain":
        return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)
    return _pointwise(x, weight, bias, "none", "")


def up_projection(x: Tensor, layer: Layer) -> Tensor:
    """Apply the first linear layer after attention, and its activation: [tokens, width] -> [tokens, inner]."""
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
        else:  # name the overload: Python tries the others first, and builds an error message for each
            y = torch.ops.mkldnn._linear_pointwise.binary(x, other, weight, bias, "add")
        return y
    return linear(x, weight, bias, product).add_(other)


def _pointwise(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, algorithm: str) -> Tensor:
    scalars: list[int | float | complex | None] = []  # parameters of the activation
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, scalars, algorithm)
    return y


def layers_as_one_call(part: Callable[..., Any] = optional_torch) -> RunLayers:
    """Return `run_layers`, compiled if this build of torch has TorchScript. The result is thread-safe.

    Args:
        part: A function that looks up a part of torch, see `optional_torch`.
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
    except Exception as error:  # noqa: BLE001  # TorchScript raises many types of errors
        log.debug("model.not_scripted", reason=str(error), instead=_IN_PARTS)
        return run_layers

    def run(x: Tensor, groups: list[Group], layers: list[Layer], causal: bool) -> Tensor:
        with optimized_execution(False):  # it would specialize on the sizes of one batch
            return scripted(x, groups, layers, causal)

    return run
