"""Layers of encoders one behind the other, as one call that holds the interpreter's lock at its beginning only.

Every call of a kernel from Python gives up the lock, and waits for it again at its end: beside an event loop and other
threads, a forward of fifty such calls waits fifty times, and so does everyone else for it. Written in the part of
Python that TorchScript knows, all layers are one call. (Its successors need a compiler where the model is served.)
Where a build of torch does not have it any more, the same functions run as the Python that they are.
"""
# Without `annotations` from __future__: TorchScript reads those of a NamedTuple, and they must not be strings.

import math
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from staged_pool.stages.log import get_logger

try:
    from torch.jit import is_scripting  # type: ignore[attr-defined]  # it is in no list of names
except ImportError:  # a torch without TorchScript

    def is_scripting() -> bool:
        return False


log = get_logger("staged_pool.models")

_LEAST_COLUMNS: Final = 64
"""Of a part of a matrix."""

_LANES: Final = {"AVX512": 16, "AVX2": 8}.get(torch.backends.cpu.get_cpu_capability(), 1)
"""Values that the processor computes at once; of others than these it is not known."""

_FEWEST_ALONE: Final = 3
"""Keys behind the last full vector that are worth a window, of"""

_MOST_VECTORS: Final = 16
"""at most: longer sequences have most of their keys in full vectors."""


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
    """How it multiplies, as `Product` has it; its matrices are laid out for that. `plain`: [in, out], `split`: [parts,
    in, out / parts]."""
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


def split_layer(layer: Layer, threads: int) -> Layer:
    """The same layer, of `plain` matrices, which are cut into parts so that each thread multiplies with parts of its
    own. They lie where they have been."""
    matrices = (layer.qkv, layer.out, layer.up, layer.down)
    qkv, out, up, down = (one.view(one.shape[0], _parts(one.shape[1], threads), -1).transpose(0, 1) for one in matrices)
    return layer._replace(product="split", qkv=qkv, out=out, up=up, down=down)


def _parts(columns: int, threads: int) -> int:
    """Into how many a matrix is cut: two for each thread, for one may be held up, as far as they are all alike and not
    too narrow for the kernel."""
    most = min(2 * threads, max(1, columns // _LEAST_COLUMNS))
    return next(parts for parts in range(most, 0, -1) if columns % parts == 0)


Through = Callable[[Tensor, list[Group], list[Tensor | None], list[Layer], bool], Tensor]


def through_layers(
    x: Tensor, groups: list[Group], windows: list[Tensor | None], layers: list[Layer], causal: bool
) -> Tensor:
    """As `run_layers`, with a window for each group that attends in one: see `window_for`."""
    for layer in layers:
        x = finish_layer(x, attend(begin_layer(x, layer), groups, windows, layer, causal), layer)
    return x


def run_layers(
    x: Tensor, groups: Sequence[Group], layers: list[Layer], causal: bool, through: Through = through_layers
) -> Tensor:
    """Run the layers on a packed batch.

    Args:
        x: [tokens, width], in the dtype of the weights.
        groups: Their tokens sum to those of `x`.
        layers: In their order.
        causal: Whether a token sees only what stands before it.
        through: Does it.

    Returns:
        [tokens, width].
    """
    each = [*groups]
    windows = [None if causal else window_for(group, x.dtype) for group in each]
    y = through(x, each, windows, layers, causal)
    if any(window is not None for window in windows) and not math.isfinite(y.sum().item()):
        # A window hides its neighbour's tokens, but a hidden NaN is a NaN still: only where it belongs may it be.
        y = through(x, each, [None] * len(each), layers, causal)
    return y


def window_for(group: Group, dtype: torch.dtype) -> Tensor | None:
    """What hides the tokens of its neighbour where a sequence attends to whole vectors of keys: [tokens, keys], 0 for
    those that are its own, -inf for the others. None: its own keys are as good.

    The kernel takes the exponential function of what is left behind the last full vector of scores one by one, through
    the C library: half of all attention of a text of 12 tokens. In a packed batch there are other tokens behind a
    sequence, whose scores may be computed and then hidden, so that no vector is left in part. One core of a Xeon with
    AVX-512, 12 heads of 32: for texts of 12, 24, 72 and 250 tokens 1.0, 1.2, 2.0 and 4.8 us a token and layer instead
    of 2.1, 2.2, 2.9 and 5.6; for 2 keys too many it is no gain.
    """
    alone = group.tokens % _LANES
    if group.seen < group.tokens or alone < _FEWEST_ALONE or group.tokens > _MOST_VECTORS * _LANES:
        return None
    return _window(group.tokens, group.tokens - alone + _LANES, dtype)


@cache
def _window(own: int, keys: int, dtype: torch.dtype) -> Tensor:
    hidden = torch.zeros(1, keys, dtype=dtype)
    hidden[:, own:] = -torch.inf
    return hidden.expand(own, -1)


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


def attend(qkv: Tensor, groups: list[Group], windows: list[Tensor | None], layer: Layer, causal: bool) -> Tensor:
    """Attend within each sequence of a packed batch: softmax(Q K^T * scaling) V.

    Args:
        qkv: [tokens, 3 * heads * head width]: queries, keys and values of a token side by side.
        groups: Their tokens sum to those of `qkv`.
        windows: For each of them: see `window_for`.
        layer: Whose attention it is.
        causal: Whether a token sees only what stands before it. Then there are no windows.

    Returns:
        [tokens, heads * head width].
    """
    width, heads, scaling = qkv.shape[1] // 3, layer.heads, layer.scaling
    attended: list[Tensor] = []
    start = 0
    for i, group in enumerate(groups):
        end, left = start + group.sequences * group.tokens, group.sequences
        window = windows[i]
        if window is not None:
            # At the end of the batch there may be too few tokens behind the last ones.
            fit = min(left, (qkv.shape[0] - start + group.tokens - window.shape[1]) // group.tokens)
            if fit > 0:
                attended.append(_attend_in_windows(qkv[start:], fit, window, heads, scaling).reshape(-1, width))
                left -= fit
        part = qkv[end - left * group.tokens : end]
        start = end
        if left == 0:
            continue
        if group.tokens == 1 and group.seen == 1:
            attended.append(part[:, 2 * width :])  # the softmax of one score is 1
            continue
        by_head = part.view(left, group.tokens, 3, heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = by_head[0], by_head[1], by_head[2]
        mask: Tensor | None = None
        if group.seen < group.tokens:
            k, v = k[:, :, : group.seen], v[:, :, : group.seen]
            if causal:
                every = torch.ones([group.tokens, group.tokens], dtype=torch.bool)
                mask = every.tril()[:, : group.seen]
        one = F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal and mask is None, scale=scaling)
        attended.append(one.transpose(1, 2).reshape(-1, width))  # nothing is moved: the kernel lays it out like that
    return attended[0] if len(attended) == 1 else torch.cat(attended)


def _attend_in_windows(qkv: Tensor, sequences: int, window: Tensor, heads: int, scaling: float) -> Tensor:
    """The first sequences of a packed batch, [sequences, tokens, heads, head width], each beside the tokens behind it
    that fit in its window."""
    tokens, keys = window.shape
    seen = qkv[: (sequences - 1) * tokens + keys].unfold(0, keys, tokens)  # [sequences, 3 * width, keys]
    by_head = seen.view(sequences, 3, heads, -1, keys).permute(1, 0, 2, 4, 3)
    q, k, v = by_head[0][:, :, :tokens], by_head[1], by_head[2]
    return F.scaled_dot_product_attention(q, k, v, window, 0.0, False, scale=scaling).transpose(1, 2)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, product: str) -> Tensor:
    """x W^T + b: [tokens, in] -> [tokens, out]."""
    if product == "plain":
        return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)
    if product == "split":
        parts, given = weight.shape[0], x.expand([weight.shape[0], -1, -1])
        y = torch.bmm(given, weight) if bias is None else torch.baddbmm(bias.view(parts, 1, -1), given, weight)
        return y.transpose(0, 1).reshape(x.shape[0], -1)
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


@cache
def layers_as_one_call() -> Callable[[Tensor, Sequence[Group], list[Layer], bool], Tensor]:
    """`run_layers`, as one call if this build of torch has TorchScript. It may run in several threads at once."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            scripted: Any = torch.jit.script(through_layers)
            optimized_execution: Any = torch.jit.optimized_execution  # type: ignore[attr-defined]
    except Exception as error:  # noqa: BLE001  # whatever a torch without it raises
        log.info("model.not_scripted", reason=str(error))
        return run_layers

    def through(
        x: Tensor, groups: list[Group], windows: list[Tensor | None], layers: list[Layer], causal: bool
    ) -> Tensor:
        with optimized_execution(False):  # which would be for the sizes of one batch, and no other has them
            y: Tensor = scripted(x, groups, windows, layers, causal)
        return y

    return partial(run_layers, through=through)
