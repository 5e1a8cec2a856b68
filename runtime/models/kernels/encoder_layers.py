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


class Int8(NamedTuple):
    """Meaning of the integers of a matrix in int8, and of its inputs; see `runtime/models/quantizing`."""

    per_input: Tensor
    """[in], float32: an input times this, plus `zero`, is rounded to an integer of 0 to 255."""
    step: float
    """Difference of two adjacent integers of the inputs."""
    zero: int
    """Integer that stands for an input of 0."""
    weight_steps: Tensor
    """[out], float32: difference of two adjacent integers of the weights."""
    weight_zeros: Tensor
    """[out]: integers that stand for a weight of 0: all 0."""


class Matrix(NamedTuple):
    """Weights of one linear layer, on the CPU."""

    weight: Tensor
    """In the layout of the layer's product."""
    bias: Tensor | None
    """[out]."""
    int8: Int8 | None
    """None: the weights are floating-point numbers."""


class Layer(NamedTuple):
    """Weights of one encoder layer: attention, then two linear layers with an activation between them.

    Both halves have a residual connection.
    """

    product: str
    """A `Product` or `int8`, which decides the layout of the matrices. `plain`: [in, out]."""
    normed_first: bool
    """True: pre-norm, a norm before each half. False: post-norm, a norm after each sum."""
    heads: int
    """Number of heads: the same for queries, keys and values."""
    scaling: float
    """Factor of the attention scores."""
    qkv: Matrix
    """The projections to queries, keys and values, side by side."""
    out: Matrix
    up: Matrix
    activation: str
    """oneDNN's name of the activation."""
    algorithm: str
    """oneDNN's name of the activation's algorithm."""
    down: Matrix
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
    return linear(x, layer.qkv, layer.product)


def finish_layer(x: Tensor, attended: Tensor, layer: Layer) -> Tensor:
    """Run the part of a layer after attention. Returns [tokens, width].

    Args:
        x: [tokens, width]: input of the layer.
        attended: [tokens, width]: result of its attention.
        layer: Its weights.
    """
    width = [x.shape[1]]
    x = linear_added(attended, layer.out, x, layer.product)
    if layer.normed_first:
        given = F.layer_norm(x, width, layer.second_norm, layer.second_norm_bias, layer.second_epsilon)
    else:
        given = x = F.layer_norm(x, width, layer.first_norm, layer.first_norm_bias, layer.first_epsilon)
    x = linear_added(up_projection(given, layer), layer.down, x, layer.product)
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


def linear(x: Tensor, matrix: Matrix, product: str) -> Tensor:
    """x W^T + b: [tokens, in] -> [tokens, out]."""
    if product != "plain":
        return _activated(x, matrix, "none", "")
    bias = matrix.bias
    return torch.mm(x, matrix.weight) if bias is None else torch.addmm(bias, x, matrix.weight)


def up_projection(x: Tensor, layer: Layer) -> Tensor:
    """Apply the first linear layer after attention, and its activation: [tokens, width] -> [tokens, inner]."""
    if layer.product != "plain":
        return _activated(x, layer.up, layer.activation, layer.algorithm)
    y = linear(x, layer.up, layer.product)
    if layer.activation == "gelu":
        torch.ops.aten.gelu_(y, approximate=layer.algorithm)
    elif layer.activation == "swish":
        torch.ops.aten.silu_(y)
    else:
        torch.relu_(y)
    return y


def linear_added(x: Tensor, matrix: Matrix, other: Tensor, product: str) -> Tensor:
    """x W^T + b + other: [tokens, in] and [tokens, out] -> [tokens, out]."""
    if product == "plain":
        return linear(x, matrix, product).add_(other)
    int8 = matrix.int8
    if int8 is not None:
        return _int8_added(x, matrix, int8, other)
    if is_scripting():
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, other, matrix.weight, matrix.bias, "add")
    else:  # name the overload: Python tries the others first, and builds an error message for each
        y = torch.ops.mkldnn._linear_pointwise.binary(x, other, matrix.weight, matrix.bias, "add")
    return y


def _activated(x: Tensor, matrix: Matrix, activation: str, algorithm: str) -> Tensor:
    scalars: list[int | float | complex | None] = []  # parameters of the activation
    int8 = matrix.int8
    if int8 is None:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, matrix.weight, matrix.bias, activation, scalars, algorithm)
        return y
    given = to_integers(x, int8)
    if is_scripting():
        y = torch.ops.onednn.qlinear_pointwise(
            given, int8.step, int8.zero, matrix.weight, int8.weight_steps, int8.weight_zeros, matrix.bias,
            1.0, 0, torch.float32, activation, scalars, algorithm,
        )  # fmt: skip
    else:
        y = torch.ops.onednn.qlinear_pointwise.default(
            given, int8.step, int8.zero, matrix.weight, int8.weight_steps, int8.weight_zeros, matrix.bias,
            1.0, 0, torch.float32, activation, scalars, algorithm,
        )  # fmt: skip
    return y


def _int8_added(x: Tensor, matrix: Matrix, int8: Int8, other: Tensor) -> Tensor:
    """Compute `linear_added` of a matrix in int8."""
    scalars: list[int | float | complex | None] = []
    given = to_integers(x, int8)
    if is_scripting():
        y: Tensor = torch.ops.onednn.qlinear_pointwise(
            given, int8.step, int8.zero, matrix.weight, int8.weight_steps, int8.weight_zeros, other, matrix.bias,
            1.0, 0, torch.float32, 1.0, 0, "add", 1.0, "none", scalars, "",
        )  # fmt: skip
    else:
        y = torch.ops.onednn.qlinear_pointwise.binary(
            given, int8.step, int8.zero, matrix.weight, int8.weight_steps, int8.weight_zeros, other, matrix.bias,
            1.0, 0, torch.float32, 1.0, 0, "add", 1.0, "none", scalars, "",
        )  # fmt: skip
    return y


def to_integers(x: Tensor, int8: Int8) -> Tensor:
    """Round inputs of a matrix to integers of 0 to 255: [tokens, in] -> [tokens, in], uint8."""
    # The cast cuts the fraction off, and of numbers outside of its range it makes anything.
    return torch.addcmul(torch.full([1], int8.zero + 0.5), x, int8.per_input).clamp_(0, 255).to(torch.uint8)


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
